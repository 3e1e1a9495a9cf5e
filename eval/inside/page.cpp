#include "eval/inside/page.h"

#include <algorithm>
#include <filesystem>

#include "cli/format.h"
#include "cli/look.h"
#include "cli/svg.h"
#include "cli/version.h"
#include "engine/io/printable.h"
#include "models/registry.h"

namespace crossply {
namespace {

constexpr const char* page_generator = "<meta name=\"generator\" content=\"crossply analyze\">";
constexpr uint64_t generator_within = 1024;  // bytes, from the file's beginning

// Nothing is loaded and nothing runs, whatever should get into the page.
constexpr const char* page_policy =
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
    "base-uri 'none'; form-action 'none'\">";

// A figure is 920 pixels wide. On a narrow screen it shrinks to fit, with a legend of its own size above it; a tap
// (focus) shows it large, to be scrolled.
constexpr const char* page_style = R"(
:root { color-scheme: light dark; --paper: #fff; --ink: #1f2933; --weak: #52606d; --line: #cbd2d9; --box: #f5f7fa;
  --link: #0b5394; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 24px 16px 64px; max-width: 992px; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, 'Segoe UI', Helvetica, Arial, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 28px; line-height: 1.2; }
h2 { margin-top: 56px; padding-top: 12px; border-top: 1px solid var(--line); font-size: 22px; line-height: 1.25; }
a { color: var(--link); }
section, figure { margin: 0; }
.wide { overflow-x: auto; }
.picture svg { display: block; width: 100%; height: auto; }
.key { display: none; margin: 4px 0; padding: 0; list-style: none; }
.key li { display: inline-block; margin-right: 16px; }
.key svg, th svg { width: 28px; height: 10px; margin-right: 6px; }
figcaption p, .note { max-width: 76ch; }
.note { color: var(--weak); }
table { border-collapse: collapse; font-size: 15px; overflow-wrap: break-word; }
th, td { padding: 4px 16px 4px 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top;
  min-width: 7em; max-width: 26em; }
th[scope=row] { white-space: nowrap; }
pre { margin: 8px 0; padding: 12px; overflow-x: auto; background: var(--box); overflow-wrap: normal;
  font: 13px/1.4 ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace; }
pre.command { white-space: pre-wrap; overflow-wrap: anywhere; }
summary { cursor: pointer; }
@media (max-width: 760px) {
  body { padding: 16px 12px 48px; }
  .key { display: block; }
  .picture:focus svg { width: 920px; }
  th, td { min-width: 5em; padding-right: 10px; }
  pre { font-size: 11px; }
}
@media print { h2 { break-after: avoid; } .picture, table { break-inside: avoid; } }
)";

constexpr const char* dark_style = R"(
:root { --paper: #0d1117; --ink: #e6edf3; --weak: #a9b6c2; --line: #3d4753; --box: #161b22; --link: #79c0ff; }
)";

// The pictures' own colours give way as the page's do.
std::string page_styles() {
  return std::string(page_style) + "@media (prefers-color-scheme: dark) {" + dark_style + svg::dark_rules("svg") +
         ".picture svg { fill: #a9b6c2; }\n}\n";
}

// Text of an element or of a quoted attribute; lines stay lines.
std::string html_text(const std::string& text) {
  std::string out;
  for (size_t from = 0; from <= text.size();) {
    const size_t end = std::min(text.find('\n', from), text.size());
    for (const char c : svg::escaped(text.substr(from, end - from)))
      out += c == '"' ? "&quot;" : c == '\'' ? "&#39;" : std::string(1, c);
    if (end < text.size()) out += '\n';
    from = end + 1;
  }
  return out;
}

std::string html_element(const std::string& tag, const std::string& text, const std::string& attributes = "") {
  return "<" + tag + attributes + ">" + html_text(text) + "</" + tag + ">\n";
}

std::string heading_of(const PageSection& section) { return section.finding ? section.finding->title : section.about; }

std::string table_of_contents(const Page& page) {
  std::string out = "<nav aria-label=\"Contents\">\n<ol>\n";
  for (const PageSection& section : page.sections)
    if (section.finding)
      out += "<li><a href=\"#" + section.name + "\">" + html_text(heading_of(section)) + "</a></li>\n";
  const bool missing = std::ranges::any_of(page.sections, [](const PageSection& section) { return !section.finding; });
  if (missing) out += "<li><a href=\"#not-here\">What is not here</a></li>\n";
  return out + "</ol>\n</nav>\n";
}

// A line as in the pictures.
std::string line_of_look(int look) {
  const std::string dash = dash_of_look(static_cast<size_t>(look));
  return str("<svg viewBox=\"0 0 28 10\" aria-hidden=\"true\"><path d=\"M0 5h28\" stroke-width=\"3\" stroke=\"",
             colour_of_look(static_cast<size_t>(look)), "\"", dash.empty() ? "" : " stroke-dasharray=\"" + dash + "\"",
             "/></svg>");
}

// For narrow screens, where the picture's own legend is small.
std::string key_of(const std::vector<PageModel>& models) {
  std::string out = "<ul class=\"key\">\n";
  for (const PageModel& model : models)
    out += "<li>" + line_of_look(model.look) + html_text(printable(model.name)) + "</li>\n";
  return out + "</ul>\n";
}

// One column for each model, so that a pair stands side by side.
std::string table_of_models(const std::vector<PageModel>& models) {
  std::string out = "<div class=\"wide\">\n<table>\n<thead><tr><th scope=\"col\">model</th>";
  for (const PageModel& model : models)
    out += "<th scope=\"col\">" + line_of_look(model.look) + html_text(printable(model.name)) + "</th>";
  out += "</tr></thead>\n<tbody>\n";
  for (size_t i = 0; !models.empty() && i < models[0].facts.size(); ++i) {
    out += "<tr><th scope=\"row\">" + html_text(models[0].facts[i].first) + "</th>";
    for (const PageModel& model : models) out += "<td>" + html_text(model.facts[i].second) + "</td>";
    out += "</tr>\n";
  }
  return out + "</tbody>\n</table>\n</div>\n";
}

std::string head_of(const Page& page) {
  std::string names;
  for (const PageModel& model : page.models) names += (names.empty() ? "" : ", ") + printable(model.name);
  std::string out = "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n" +
                    std::string(page_generator) + "\n" + page_policy +
                    "\n<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n";
  out += html_element("title", "Inside " + names) + "<style>" + page_styles() + "</style>\n</head>\n<body>\n<header>\n";
  out += html_element("h1", page.models.size() == 1 ? "Inside a model" : str("Inside ", page.models.size(), " models"));
  out +=
      "<p>What goes on inside trained language models, measured on data. Layers, heads and tokens are numbered from 0; "
      "a window is a run of tokens that the model reads from its beginning. Under each figure stands what these "
      "models show, how it was measured, and what a paper saw in larger models, where one did.</p>\n";
  if (page.analyses > page.sections.size())
    out += str("<p class=\"note\">Not complete: ", page.sections.size(), " of ", page.analyses,
               " analyses are here.</p>\n");
  out += "<p class=\"key note\">On a narrow screen, tap a figure to enlarge it.</p>\n" + table_of_models(page.models);
  out += "<p>Data: " + html_text(printable(page.data)) + ". Seed of all that is random: " + std::to_string(page.seed) +
         ". Made by crossply, commit " + html_text(commit()) + ". The command that makes this page again:</p>\n" +
         html_element("pre", printable(page.command), " class=\"command\"");
  return out + "</header>\n" + table_of_contents(page) + "<main>\n";
}

std::string left_out_of(const PageSection& section) {
  std::string out;
  for (const auto& [model, why] : section.left_out)
    out += "<p class=\"note\">Without " + html_text(printable(model)) + ": " + html_text(printable(why)) + "</p>\n";
  return out;
}

// Of pictures whose lines are the models.
bool has_key(const Finding& found, const std::vector<PageModel>& models) {
  return found.svg.find("<polyline") != std::string::npos && models.size() > 1;
}

std::string section_html(const PageSection& section, const std::vector<PageModel>& models) {
  const Finding& found = *section.finding;
  std::string out = "<section id=\"" + section.name + "\">\n" + html_element("h2", found.title);
  out += "<figure>\n" + (has_key(found, models) ? key_of(models) : "") +
         "<div class=\"wide picture\" tabindex=\"0\">\n" + svg::with_ids(found.svg, section.name + "-") +
         "</div>\n<figcaption>\n";
  if (!found.shown.empty()) out += "<p><strong>What these models show.</strong> " + html_text(found.shown) + "</p>\n";
  out += "<p><strong>What is measured.</strong> " + html_text(found.measured) + "</p>\n";
  if (!found.paper.empty()) out += "<p><strong>What the paper saw.</strong> " + html_text(found.paper) + "</p>\n";
  out += "</figcaption>\n</figure>\n";
  if (!section.windows.empty()) out += "<p class=\"note\">Looked at: " + html_text(section.windows) + ".</p>\n";
  out += left_out_of(section);
  out += "<details>\n<summary>The numbers as a table</summary>\n" + html_element("pre", printable(found.table)) +
         "</details>\n<p class=\"note\">All numbers, in the directory where this page was written:";
  std::vector<std::string> files = {section.name + ".json", section.name + ".csv", section.name + ".svg"};
  files.insert(files.end(), section.files.begin(), section.files.end());
  const char* separator = " ";
  for (const std::string& file : files) {
    out += separator + file;  // no link: the page stands alone, also where it was copied to
    separator = ", ";
  }
  return out + "</p>\n</section>\n";
}

std::string not_here(const Page& page) {
  std::string out;
  for (const PageSection& section : page.sections)
    if (!section.finding) out += html_element("h3", section.name + ": " + section.about) + left_out_of(section);
  return out.empty() ? "" : "<section id=\"not-here\">\n<h2>What is not here</h2>\n" + out + "</section>\n";
}

// "rate=2, dynamic=false" of what somebody chose; an option's default is what everybody gets.
std::string chosen_options(const Config& config, const Architecture& architecture) {
  std::string out;
  for (const Option& option : architecture.options)
    if (const std::string& value = config.text(option.key); value != option.default_value)
      out += str(out.empty() ? "" : ", ", option.key, "=", value);
  return architecture.options.empty() ? "it has none" : out.empty() ? "all as usual" : out;
}

bool is_our_page(const std::string& path) {
  const InputFile file(path);
  std::string begin(static_cast<size_t>(std::min(file.size(), generator_within)), '\0');
  file.read(0, begin.data(), begin.size());
  return begin.find(page_generator) != std::string::npos;
}

std::string page_path(const std::string& dir) { return dir + "/report.html"; }

}  // namespace

PageModel page_model(const Subject& subject, int look) {
  const Config& c = subject.config();
  const Architecture& architecture = find_architecture(c.arch);
  const std::string heads = str(c.num_attention_heads, " of width ", c.head_dim,
                                c.num_key_value_heads == c.num_attention_heads
                                    ? ""
                                    : str(", which share ", c.num_key_value_heads, " for keys and values"));
  return {subject.name,
          {{"architecture", c.arch == c.backbone ? c.arch : str(c.arch, " on ", c.backbone)},
           {"which is", architecture.meaning},
           {"its options", chosen_options(c, architecture)},
           {"layers", described_layers(c)},
           {"width", str(format_count(c.hidden_size), " (of the MLP ", format_count(c.intermediate_size), ")")},
           {"heads", heads},
           {"vocabulary", format_count(c.vocab_size)},
           {"parameters", format_count(subject.model.params.count())},
           {"data", printable(describe_split(subject.data.choice, false))}},
          look};
}

std::string page_html(const Page& page) {
  std::string out = head_of(page);
  for (const PageSection& section : page.sections)
    if (section.finding) out += section_html(section, page.models);
  return out + not_here(page) + "</main>\n</body>\n</html>\n";
}

void check_page_out(const std::string& dir) {
  const std::string path = page_path(dir);
  if (!path_exists(path)) return;
  std::error_code failed;
  if (!std::filesystem::is_regular_file(path, failed))
    fail(Exit::usage, "--out: ", path, " is no file; move it away or choose another directory");
  if (!is_our_page(path)) refuse_foreign_file(path);
}

std::string write_page(const std::string& dir, const Page& page) {
  write_file_atomically(page_path(dir), page_html(page));
  return printable(page_path(dir));
}

}  // namespace crossply

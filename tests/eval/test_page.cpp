// The page of analyze --what all: for readers without us, so whole, safe and the same again.
#include "eval/inside/page.h"

#include <regex>

#include "cli/curve.h"
#include "cli/svg.h"
#include "eval/inside/heat_map.h"
#include "tests/support/inside.h"

using namespace crossply;
using namespace crossply::test;

namespace {

const std::string evil = "<script>alert(1)</script>&\"'><img src=x onerror=alert(1)>";

// A picture of the house that is cut off at its edge, which gives it an id.
std::string cut_picture(const std::string& title) {
  const Curve rising{title, {0, 1, 2}, {1, 2, 9}};
  return curve_svg(title, "layer", {{"one", "", {rising}}, {"two", "", {rising}}});
}

PageSection section(const std::string& name, const std::string& text, const std::string& svg) {
  Finding found;
  found.title = "Title " + text, found.table = "table " + text + "\nsecond line\x1b[31m\n";
  found.svg = svg, found.measured = "measured " + text, found.paper = "paper " + text;
  found.shown = "shown " + text;
  return {name, "about " + text, found, "3 windows of 5 tokens", {}, {}};
}

Page page_of(const std::string& text) {
  Page page{"analyze --model " + text, "text:" + text, 42, {}, {}};
  page.models.push_back({text, {{"architecture", text}, {"layers", "3"}}});
  page.models.push_back({"lime", {{"architecture", "lime"}, {"layers", "4"}}});
  page.sections.push_back(section("one", text, cut_picture(text)));
  page.sections.push_back(section("two", text, cut_picture(text)));
  page.sections.push_back(section("three", text, heat_map_svg(text, text, text, {{text, {{text, {{1, 2}}}}}})));
  page.sections[1].left_out = {{text, "it has no gates: " + text}};
  page.sections[2].files = {"three.1.safetensors"};
  page.sections.push_back({"gates", "about gates", {}, "", {{text, "no gates"}, {"lime", "none here either"}}, {}});
  return page;
}

// All tags as they stand in the file.
std::vector<std::string> tags_of(const std::string& page) {
  std::vector<std::string> tags;
  for (size_t at = page.find('<'); at != std::string::npos; at = page.find('<', at)) {
    size_t end = at;
    for (bool quoted = false; end < page.size() && (quoted || page[end] != '>'); ++end) quoted ^= page[end] == '"';
    tags.push_back(page.substr(at, end + 1 - at));
    at = end;
  }
  return tags;
}

std::vector<std::string> matches(const std::string& text, const char* pattern) {
  const std::regex regex(pattern);
  std::vector<std::string> all;
  for (std::sregex_iterator at(text.begin(), text.end(), regex), end; at != end; ++at) all.push_back((*at)[1]);
  return all;
}

// A random model of seven tokens; large: of weights that overflow.
void save_random(const std::string& dir, const std::string& choice, bool large = false) {
  TinyModel model(tiny_with(choice, 2, false));
  if (large) model.fill("model.layers.0.self_attn.v_proj.weight", [](int64_t) { return 3e38; });
  save_model(dir, model.params, model.config);
}

}  // namespace

TEST_CASE("page: text from outside stays text, and nothing is loaded from anywhere") {
  const std::string page = page_html(page_of(evil));
  const std::set<std::string> known = {
      "!DOCTYPE", "html", "head",  "meta",   "title",   "style",   "body",       "header",  "h1",      "h2",      "h3",
      "p",        "div",  "table", "thead",  "tbody",   "tr",      "th",         "td",      "pre",     "nav",     "ol",
      "ul",       "li",   "a",     "main",   "section", "figure",  "figcaption", "strong",  "details", "summary", "svg",
      "rect",     "text", "path",  "circle", "g",       "polygon", "polyline",   "clipPath"};
  for (const std::string& tag : tags_of(page)) {
    const std::vector<std::string> name = matches(tag, "^</?([!A-Za-z0-9]+)");
    REQUIRE_MESSAGE(name.size() == 1, tag);
    CHECK_MESSAGE(known.contains(name[0]), tag);
    CHECK_MESSAGE(matches(tag, "[\\s\"]((on[a-z]+|src|srcset|data)=)").empty(), tag);
    for (const std::string& link : matches(tag, "href=\"([^\"]*)\""))
      CHECK_MESSAGE(!matches(link, "^(#[a-z0-9-]+)$").empty(), tag);  // it also works where it was copied to
  }
  CHECK(count_of(page, "&lt;script&gt;alert(1)&lt;/script&gt;&amp;") > 10);
  check_has(page, {"<title>Inside &lt;script&gt;alert(1)&lt;/script&gt;&amp;&quot;&#39;",
                   "Content-Security-Policy\" content=\"default-src 'none';"});
  check_has(page, {"<html lang=\"en\">", "name=\"viewport\"", "<meta charset=\"utf-8\">"});
  // Any bytes.
  const std::string bytes = page_html(page_of("\xFF\xC3\x01\x1b[2J\n"));
  for (const char c : {'\xFF', '\x01', '\x1b'}) CHECK(bytes.find(c) == std::string::npos);
}

TEST_CASE("page: everything is there, in order, and linked") {
  const std::string page = page_html(page_of("plain"));
  size_t last = 0;
  for (const char* part : {"<h1>Inside 2 models</h1>",
                           ">plain</th><th scope=\"col\">",
                           ">lime</th>",
                           "<th scope=\"row\">layers</th><td>3</td><td>4</td>",
                           "text:plain",
                           "Made by crossply, commit ",
                           "analyze --model plain",
                           "href=\"#one\"",
                           "href=\"#three\"",
                           "href=\"#not-here\"",
                           "<section id=\"one\">",
                           "<h2>Title plain</h2>",
                           "<svg ",
                           "What these models show.</strong> shown plain",
                           "measured plain",
                           "paper plain",
                           "3 windows of 5 tokens",
                           "<details>",
                           "table plain\nsecond line\\x1b[31m\n",
                           "one.json, one.csv, one.svg",
                           "<section id=\"two\">",
                           "Without plain: it has no gates",
                           "<section id=\"three\">",
                           "three.1.safetensors",
                           "<section id=\"not-here\">",
                           "gates: about gates",
                           "Without plain: no gates",
                           "Without lime: none here either",
                           "</html>"}) {
    const size_t at = page.find(part, last);
    CHECK_MESSAGE(at != std::string::npos, std::string(part));
    if (at != std::string::npos) last = at;
  }
  CHECK(!has(page, "href=\"#gates\""));
  CHECK(page == page_html(page_of("plain")));
}

TEST_CASE("page: what is not there is not said, and an unfinished page says so") {
  Page page = page_of("plain");
  page.sections[0].finding->paper.clear(), page.sections[0].finding->shown.clear();
  const std::string html = page_html(page);
  CHECK(count_of(html, "What the paper saw.") == 2);
  CHECK(count_of(html, "What these models show.") == 2);
  CHECK(!has(html, "Not complete"));
  page.analyses = 12;
  CHECK(has(page_html(page), "Not complete: 4 of 12 analyses are here."));
}

TEST_CASE("page: dark colours, and a key of the models for narrow screens") {
  Page page = page_of("plain");
  page.models[0].look = 0, page.models[1].look = 1;
  const std::string html = page_html(page);
  check_has(html, {"@media (prefers-color-scheme: dark)", "svg [fill=\"#1f2933\"] { fill: "});
  CHECK(count_of(html, "tap a figure to enlarge it") == 1);
  CHECK(count_of(html, "<ul class=\"key\">") == 2);  // of the pictures with lines, not of the heat map
  CHECK(count_of(html, "d=\"M0 5h28\" stroke-width=\"3\" stroke=\"#D55E00\" stroke-dasharray=\"7 3\"/>") == 3);
}

TEST_CASE("page: pictures below each other keep their names apart, too") {
  const std::string one = cut_picture("a"), both = svg::below_each_other("both", {one, one});
  for (const char* id : {" id=\"part0-plot0\"", " id=\"part1-plot0\"", "url(#part0-plot0)", "url(#part1-plot0)"})
    CHECK(count_of(both, id) == 1);
  CHECK(!has(both, "\"plot0"));
}

TEST_CASE("page: ids are of one element each, and every reference names one") {
  const Page given = page_of("id=\"plot0\" url(#plot0) href=\"#plot0\"");
  REQUIRE(has(given.sections[0].finding->svg, "<clipPath id=\"plot0\""));
  const std::string page = page_html(given);
  std::map<std::string, int> ids;
  std::set<std::string> used;
  for (const std::string& tag : tags_of(page)) {
    for (const std::string& id : matches(tag, " id=\"([^\"]*)\"")) ++ids[id];
    for (const std::string& id : matches(tag, "(?:url\\(|href=\")#([^)\"]*)")) used.insert(id);
  }
  for (const auto& [id, times] : ids) CHECK_MESSAGE(times == 1, id);
  for (const std::string& id : used) CHECK_MESSAGE(ids.contains(id), id);
  for (const char* id : {"one-plot0", "one-plot1", "two-plot0"}) CHECK(used.contains(id));
  CHECK(has(page, ">id=\"plot0\" url(#plot0)"));  // as text it is nobody's name
}

TEST_CASE("page: analyze --what all writes it of what is possible, the same again, and over nothing of others") {
  const TempDir scratch;
  save_random(scratch.file("llama"), "llama"), save_random(scratch.file("lime"), "lime:routing=last:window=3");
  std::vector<uint32_t> tokens;
  for (uint32_t i = 0; i < 400; ++i) tokens.push_back((i * i + i / 7) % 7);
  write_shard(scratch.file("x.bin"), tokens, ShardFormat::uint16);
  const std::string out = scratch.file("out"), report = out + "/report.html";
  const auto analyze = [&](const std::vector<std::string>& more) {
    return run_program_inside(
        scratch,
        joined(std::vector<std::string>{"analyze", "--data", scratch.file("x.bin"), "--sequences", "2"}, more));
  };
  const std::vector<std::string> tiny =
                                     split_words("--what all --out " + out + " --length 6 --sae-tokens 2000 --model"),
                                 all = joined(tiny, std::vector{scratch.file("llama"), scratch.file("lime")});
  check_outcome(analyze(all), Exit::done, "report.html");
  const std::string page = read_text(report);
  check_has(page, {"<h2>Rank and mass of attention</h2>", "2 windows of 6 tokens, the same for all models",
                   "routing=last, window=3", "every layer reads the layer below", "--what all --out "});
  check_outcome(analyze(all), Exit::done, "1 of ");  // over its own
  CHECK(read_text(report) == page);
  // What cannot be is told on the page; where nothing can be, there is no new one.
  const Outcome alone = analyze(joined(tiny, std::vector{scratch.file("llama")}));
  check_outcome(alone, Exit::done, "left out: ");
  check_has(alone.output, {"routing.json, .csv and .svg are of an earlier call", "Rank and mass of attention\n\n"});
  const std::string none = read_text(report);
  CHECK(has(none, "<h3>routing: "));
  CHECK(!has(none, "href=\"routing.json\""));
  check_outcome(analyze({"--what", "all", "--out", out, "--length", "1000", "--model", scratch.file("llama")}),
                Exit::usage, "nothing could be measured");
  CHECK(read_text(report) == none);
  // What is broken ends the program, and the page stays.
  save_random(scratch.file("huge"), "llama", true);
  check_outcome(analyze(joined(tiny, std::vector{scratch.file("llama"), scratch.file("huge")})), Exit::not_finite,
                "huge: ");
  CHECK(read_text(report) == none);
  // Nobody else's page is written over, and what makes no sense is said.
  write_text(report, "<html><title>mine</title>");
  check_outcome(analyze(all), Exit::usage, "report.html exists and was not written by this program");
  CHECK(read_text(report) == "<html><title>mine</title>");
  std::filesystem::remove(report), std::filesystem::create_directories(report);
  check_outcome(analyze(all), Exit::usage, "report.html is no file");
  const std::string model = scratch.file("llama");
  check_outcome(analyze({"--what", "attention", "--model", model, model + "/"}), Exit::usage, "is there twice");
  // Before any work: what a model has not, and whose a file is that only comes at the end.
  const Outcome refused = analyze({"--what", "attention", "gates", "--model", model});
  check_outcome(refused, Exit::usage, "has no gates");
  CHECK(!has(refused.output, "GFLOP"));
  write_text(scratch.file("sae.safetensors"), "mine");
  const Outcome foreign = analyze({"--what", "attention", "sae", "--out", scratch.path.string(), "--model", model});
  check_outcome(foreign, Exit::usage, "sae.safetensors exists and was not written by this program");
  CHECK(!has(foreign.output, "GFLOP"));
  check_outcome(analyze({"--what", "all", "--model", model}), Exit::usage, "give --out DIR too");
  check_outcome(analyze({"--what", "attention", "all", "--out", out, "--model", model}), Exit::usage,
                "all stands alone");
}

#include "models/disk/modelling_file.h"

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <filesystem>
#include <set>
#include <sstream>
#include <vector>

#include "engine/io/file.h"
#include "engine/io/printable.h"
#include "engine/io/python_files.h"
#include "models/combined.h"
#include "models/engram.h"
#include "models/model.h"

namespace crossply {
namespace {

// The file that has the class of one architecture; "" where there is none.
std::string file_of(const std::string& arch) {
  const std::string begin = "\nclass " + class_stem(arch) + (arch == "llama" ? "(nn.Module):" : "(Llama):");
  for (const auto& [name, text] : python_files())
    if (text.find(begin) != std::string::npos) return name;
  return "";
}

// Of an architecture, or of the parts of a combination: each once, in their order. Empty where one has none.
std::vector<std::string> files_of(const std::string& arch) {
  std::vector<std::string> files;
  for (const std::string& part : parts_of(arch)) {
    const std::string file = file_of(part);
    if (file.empty()) return {};
    if (std::ranges::count(files, file) == 0) files.push_back(file);
  }
  return files;
}

// Lines, each after what it is sorted by: of one package, "import" stands before "from".
using Imports = std::set<std::pair<std::string, std::string>>;

// A file of dev/reference, taken apart.
struct PythonModule {
  std::string docstring;  // without its quotes
  Imports imports;        // of modules that are not in dev/reference
  std::string code;
};

PythonModule take_apart(const std::string& text) {
  const std::string quotes = "\"\"\"";
  const size_t begin = quotes.size(), end = text.find(quotes, begin);
  CHECK_THAT(text.starts_with(quotes) && end != std::string::npos, "a file of dev/reference begins with no docstring");
  PythonModule part;
  part.docstring = text.substr(begin, end - begin);
  std::istringstream lines(text.substr(end + quotes.size()));
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string first, module;
    words >> first >> module;
    if (!line.starts_with("import ") && !line.starts_with("from ")) part.code += line + "\n";
    else if (!module.starts_with("."))
      part.imports.emplace(module.substr(0, module.find('.')) + (first == "import" ? " 0" : " 1"), line);
  }
  part.code.erase(0, part.code.find_first_not_of('\n'));
  return part;
}

}  // namespace

std::string class_stem(const std::string& arch) {
  std::string stem;
  bool begins = true;
  for (char c : joined_names(parts_of(arch), "_and_")) {
    if (c != '_') stem += begins ? static_cast<char>(std::toupper(static_cast<unsigned char>(c))) : c;
    begins = c == '_';
  }
  return stem;
}

std::string library_name(const std::string& arch) { return "crossply_" + joined_names(parts_of(arch), "_and_"); }

std::string modelling_module(const std::string& arch) {
  return files_of(arch).empty() ? "" : "modeling_" + library_name(arch);
}

std::string modelling_file(const std::string& arch) {
  const std::vector<std::string> own = files_of(arch);
  const std::string stem = class_stem(arch), name = "Crossply" + stem;
  CHECK_THAT(!own.empty(), "dev/reference has no ", arch);
  std::vector<std::string> files = {"engram.py", "config.py", "gpt2.py", "llama.py"};
  for (const std::string& file : own)
    if (file != "llama.py") files.push_back(file);
  if (is_combined(arch)) files.push_back("combined.py");
  files.push_back("hf.py");
  std::vector<PythonModule> parts;
  Imports standard, others;
  for (const std::string& file : files) {
    parts.push_back(take_apart(python_files().at(file)));
    for (const auto& import : parts.back().imports)
      (import.second.starts_with("import ") && !import.first.starts_with("torch") ? standard : others).insert(import);
  }
  const auto quoted = [](const std::string& docstring) { return "\"\"\"" + docstring + "\"\"\"\n"; };
  // What the file is about stands at its beginning, not in front of its part.
  const size_t main = is_combined(arch) ? files.size() : std::ranges::find(files, own[0]) - files.begin();
  std::string text = quoted(is_combined(arch) ? joined_names(parts_of(arch), " and ") +
                                                    " in PyTorch, together in one model. Each is explained in front of "
                                                    "its classes.\n"
                                              : parts[main].docstring) +
                     "# Written by crossply with the model: AutoModelForCausalLM.from_pretrained(DIR, "
                     "trust_remote_code=True) runs it.\n";
  for (const auto& [module, line] : standard) text += line + "\n";
  text += "\n";
  for (const auto& [module, line] : others) text += line + "\n";
  for (size_t i = 0; i < parts.size(); ++i)
    text +=
        "\n\n# " + std::string(118, '-') + "\n" + (i == main ? "" : quoted(parts[i].docstring) + "\n") + parts[i].code;
  if (is_combined(arch)) {
    std::string classes;
    for (const std::string& part : parts_of(arch)) classes += (classes.empty() ? "" : ", ") + class_stem(part);
    text += "\n\n" + stem + " = combined(" + classes + ")\n";
  }
  text += "\n\nclass " + name + "Config(CrossplyConfig):\n  model_type = \"" + library_name(arch) + "\"\n";
  text += "\n\nclass " + name + "Model(CrossplyModel, " + stem + ".backbone):\n  pass\n";
  return text + "\n\nclass " + name + "ForCausalLM(CrossplyForCausalLM):\n  model_class = " + name +
         "Model\n  reference, config_class = " + stem + ", " + name + "Config\n";
}

namespace {

// Does a class of this Python that inherits from `base` have the method?
bool replaces(const std::string& python, const std::string& base, const std::string& method) {
  for (size_t at = python.find("(" + base + "):"); at != std::string::npos; at = python.find("(" + base + "):", at + 1))
    if (python.find("def " + method + "(", at) < python.find("\nclass ", at)) return true;
  return false;
}

// A layer class that replaces its sublayers, with their norms, and does not only add to them.
bool has_own_layer(const std::string& python) { return replaces(python, "Layer", "sublayers"); }

// An architecture as dev/reference sees it: by its classes, whatever its options.
struct PythonPart {
  std::string name, python;
  std::set<std::string> owned = {};
  bool gives_up = false;  // has given a thing up, for which it has other classes

  bool has_own_layer() const { return owned.contains(owned_stream) && crossply::has_own_layer(python); }
};

PythonPart python_part(const std::string& name) {
  PythonPart part{name, python_files().at(file_of(name))};
  if (has_own_layer(part.python) || replaces(part.python, "Backbone", "forward")) part.owned.insert(owned_stream);
  if (replaces(part.python, "Attention", "project")) part.owned.insert(owned_heads);
  if (replaces(part.python, "Attention", "route")) part.owned.insert(owned_choice);
  for (const char* method : {"mix", "attend"})
    if (replaces(part.python, "Attention", method)) part.owned.insert(owned_attention);
  return part;
}

// Of several owners of a thing: who has other classes for a place beside another owner takes them. All else that it
// owns stays.
void give_up(std::vector<PythonPart>& parts, const char* thing) {
  if (std::ranges::count_if(parts, [&](const PythonPart& part) { return part.owned.contains(thing); }) < 2) return;
  for (PythonPart& part : parts) {
    const size_t others = part.python.find("\n  beside_owner = ");
    if (part.gives_up || !part.owned.contains(thing) || others == std::string::npos) continue;
    if (part.python.find(str('"', thing, "\":"), others) == std::string::npos) continue;
    part.owned.erase(thing);
    part.gives_up = true;
  }
}

// Has some layer no keys and values of its own because of this part?
bool leaves_layers_none(const Config& config, const std::string& part) {
  ParameterTable params;
  declare_applications(params, part_config(config, part));
  for (int i = 0; i < config.num_hidden_layers; ++i)
    if (!params.contains(layer_name(i, "self_attn.k_proj.weight"))) return true;
  return false;
}

// Why combined.py refuses a model of these parts that C++ takes; "" where it takes it, too. Here a part owns what its
// classes replace, in C++ what it changes with its options.
std::string why_not_together(const Config& config, std::vector<PythonPart>& parts) {
  for (const char* thing : {owned_stream, owned_heads, owned_choice, owned_attention}) {
    give_up(parts, thing);
    std::string owners;
    for (const PythonPart& part : parts)
      if (part.owned.contains(thing)) owners += (owners.empty() ? "" : " and ") + part.name;
    if (owners.find(' ') != std::string::npos) return str("in its modelling file ", owners, " both change ", thing);
  }
  for (const PythonPart& one : parts)
    for (const PythonPart& other : parts) {
      if (&one == &other) continue;
      if (other.owned.contains(owned_attention) && leaves_layers_none(config, one.name))
        return str("in its modelling file ", other.name, " reads keys of its own in every layer, and ", one.name,
                   " leaves some none");
      if (replaces(one.python, "Attention", "attend") && other.owned.contains(owned_choice))
        return str("in its modelling file ", one.name, " attends to a layer's own keys and values, whatever ",
                   other.name, " chooses");
    }
  return "";
}

}  // namespace

std::string without_modelling_file(const Config& config) {
  const std::string& arch = config.arch;
  if (files_of(arch).empty()) return "";
  const std::string why = str("transformers cannot load this ", arch, ": ");
  const bool alone = arch == config.backbone && !has_engram(config), again = config.loop.tied && config.loop.passes > 1;
  if (has_anchor(config) && again && !alone)
    return why + "a modelling file runs layers several times only where nothing is beside them; try --loop-tied false";
  std::vector<PythonPart> parts;
  for (const std::string& part : parts_of(arch)) parts.push_back(python_part(part));
  if (is_combined(arch))
    if (const std::string reason = why_not_together(config, parts); !reason.empty()) return why + reason;
  return config.block_norm != "pre" && std::ranges::any_of(parts, &PythonPart::has_own_layer)
             ? why + "its modelling file knows no --block-norm"
             : "";
}

std::vector<std::string> modelling_files_in(const std::string& model_dir) {
  const std::string begin = "modeling_crossply_", end = ".py", between = "_and_";
  std::vector<std::string> there;
  std::error_code error;
  for (std::filesystem::directory_iterator it(model_dir, error), last; !error && it != last; it.increment(error)) {
    std::string arch = it->path().filename();
    if (!arch.starts_with(begin) || !arch.ends_with(end)) continue;
    arch = arch.substr(begin.size(), arch.size() - begin.size() - end.size());
    for (size_t at = arch.find(between); at != std::string::npos; at = arch.find(between))
      arch.replace(at, between.size(), "+");
    if (!modelling_module(arch).empty()) there.push_back(arch);
  }
  std::ranges::sort(there);
  return there;
}

void note_outdated_modelling_file(const std::string& model_dir, const std::string& named) {
  static std::set<std::string> said;
  for (const std::string& arch : modelling_files_in(model_dir)) {
    const std::string path = model_dir + "/" + modelling_module(arch) + ".py";
    if (file_holds(path, modelling_file(arch)) || !said.insert(model_dir).second) continue;
    std::fprintf(stderr,
                 "note: %s is not what this build writes, and transformers may compute other numbers with it; to "
                 "rewrite it, give %s to build/transplant --refresh\n",
                 printable(path).c_str(), printable(named).c_str());
  }
}

}  // namespace crossply

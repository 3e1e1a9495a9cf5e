#include "models/disk/modelling_file.h"

#include <cctype>
#include <cstdio>
#include <set>
#include <sstream>
#include <vector>

#include "engine/io/file.h"
#include "engine/io/printable.h"
#include "engine/io/python_files.h"
#include "models/engram.h"
#include "models/registry.h"

namespace crossply {
namespace {

// The file that has the architecture's class; "" where there is none.
std::string file_of(const std::string& arch) {
  const std::string begin = "\nclass " + class_stem(arch) + (arch == "llama" ? "(nn.Module):" : "(Llama):");
  for (const auto& [name, text] : python_files())
    if (text.find(begin) != std::string::npos) return name;
  return "";
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
  for (char c : arch) {
    if (c != '_') stem += begins ? static_cast<char>(std::toupper(static_cast<unsigned char>(c))) : c;
    begins = c == '_';
  }
  return stem;
}

std::string modelling_module(const std::string& arch) {
  return file_of(arch).empty() ? "" : "modeling_crossply_" + arch;
}

std::string modelling_file(const std::string& arch) {
  const std::string own = file_of(arch), stem = class_stem(arch), name = "Crossply" + stem;
  CHECK_THAT(!own.empty(), "dev/reference has no ", arch);
  std::vector<std::string> files = {"engram.py", "config.py", "gpt2.py", "llama.py"};
  if (own != files.back()) files.push_back(own);
  const size_t main = files.size() - 1;
  files.push_back("hf.py");
  std::vector<PythonModule> parts;
  Imports standard, others;
  for (const std::string& file : files) {
    parts.push_back(take_apart(python_files().at(file)));
    for (const auto& import : parts.back().imports)
      (import.second.starts_with("import ") && !import.first.starts_with("torch") ? standard : others).insert(import);
  }
  const auto docstring = [&](size_t i) { return "\"\"\"" + parts[i].docstring + "\"\"\"\n"; };
  std::string text = docstring(main) +
                     "# Written by crossply with the model: AutoModelForCausalLM.from_pretrained(DIR, "
                     "trust_remote_code=True) runs it.\n";
  for (const auto& [module, line] : standard) text += line + "\n";
  text += "\n";
  for (const auto& [module, line] : others) text += line + "\n";
  for (size_t i = 0; i < parts.size(); ++i)
    text += "\n\n# " + std::string(118, '-') + "\n" + (i == main ? "" : docstring(i) + "\n") + parts[i].code;
  text += "\n\nclass " + name + "Config(CrossplyConfig):\n  model_type = \"crossply_" + arch + "\"\n";
  text += "\n\nclass " + name + "Model(CrossplyModel, " + stem + ".backbone):\n  pass\n";
  return text + "\n\nclass " + name + "ForCausalLM(CrossplyForCausalLM):\n  model_class = " + name +
         "Model\n  reference, config_class = " + stem + ", " + name + "Config\n";
}

// Does this Python replace what a layer does, with its norms, and not only add to it?
static bool has_own_layer(const std::string& python) {
  const size_t layer = python.find("(Layer):");
  return layer != std::string::npos && python.find("def forward(", layer) < python.find("\nclass ", layer);
}

std::string without_modelling_file(const Config& config) {
  const std::string& arch = config.arch;
  if (file_of(arch).empty()) return "";
  const std::string why = str("transformers cannot load this ", arch, ": ");
  const bool alone = arch == config.backbone && !has_engram(config), again = config.loop.tied && config.loop.passes > 1;
  if (has_anchor(config) && again && !alone)
    return why + "a modelling file runs layers several times only where nothing is beside them; try --loop-tied false";
  return config.block_norm != "pre" && has_own_layer(python_files().at(file_of(arch)))
             ? why + "its modelling file knows no --block-norm"
             : "";
}

std::vector<std::string> modelling_files_in(const std::string& model_dir) {
  std::vector<std::string> there;
  for (const Architecture& architecture : architectures())
    if (const std::string module = modelling_module(architecture.name);
        !module.empty() && path_exists(model_dir + "/" + module + ".py"))
      there.push_back(architecture.name);
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

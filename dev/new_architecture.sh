#!/usr/bin/env bash
# Writes the skeleton of an architecture: models/NAME.cpp, which computes a plain LLaMA until you change it, its lines in
# the registry, and train/train_NAME.cpp. docs/add-a-connection.md goes on from there.
#   dev/new_architecture.sh NAME      or: make new ARCH=NAME
set -euo pipefail
cd "$(dirname "$0")/.."
name=${1:-} model=models/${1:-}.cpp trainer=train/train_${1:-}.cpp

refuse() { echo "new: $*" >&2; exit 64; }
[ -n "$name" ] || refuse "give the architecture a name: make new ARCH=myidea"
[[ $name =~ ^[a-z][a-z0-9_]{0,30}$ && $name != *__* && $name != *_ ]] ||
  refuse "'$name' cannot be a name: it needs a-z first, then up to 30 of a-z, 0-9 and _, as in my_idea2"
if [ "$name" = all ] || grep -qE "\"$name\"|[ ]${name}_architecture[(]" models/registry.cpp; then
  refuse "there is an architecture $name already; take another name"
fi
for file in "$model" "$trainer"; do
  [ ! -e "$file" ] || refuse "$file is there already; take another name, or remove it"
done
# my_idea2 -> MyIdea2
class=$(awk -v RS=_ '{printf "%s%s", toupper(substr($1, 1, 1)), substr($1, 2)}' <<<"$name")

cat >"$model" <<END
// $name: say here in one sentence what your idea is.
// train/train_$name.cpp explains it, with equations.
// Until you change it, it is a plain LLaMA.
#include "kernels/reference/ops.h"
#include "models/registry.h"

namespace crossply {
namespace {

// Each hook does here what it does without you. Change those that your idea needs and delete the others.
class ${class}Connection : public Connection {
 public:
  // The parameters: name, shape, start, role (engine/params.h lists them), weight decay.
  //   void declare(ParameterTable& params, const Config& c) const override {
  //     for (int n = 1; n < c.num_hidden_layers; ++n)
  //       params.add(layer_name(n, "self_attn.my.weight"), Shape{c.num_key_value_heads}, Init::constant(0),
  //                  Role::scalar, {.wd_mul = 0});
  //   }
  // Sets how they start where it is to be a LLaMA, bit for bit: start_at(params, "my.weight", Init::constant(0)).
  // The tests hold you to it. Delete this where no start does that.
  std::string start_as_plain(ParameterTable&, const Config&) const override { return ""; }

  Value* read(const Sublayer& sublayer) override { return Connection::read(sublayer); }
  QueryKeyValue project(int layer, Value* x) override { return Connection::project(layer, x); }
  KeyValue kv(int layer, KeyValue own) override { return Connection::kv(layer, own); }
  Value* attend(int layer, QueryKeyValue own) override { return Connection::attend(layer, own); }
  void write(const Sublayer& sublayer, Value* y) override { Connection::write(sublayer, y); }
  Value* finish() override { return Connection::finish(); }
};

}  // namespace

Architecture ${name}_architecture() {
  const auto make = [](const Config&) { return std::make_unique<${class}Connection>(); };
  return {"$name", "what it is in one line", {}, make, /*draft=*/true};
}

}  // namespace crossply
END

# The trainer is that of LLaMA under another name.
{
  echo "// train_$name: say here what your idea is and what it costs. Until it changes, this is LLaMA's page:"
  echo "//"
  sed "s/train_llama/train_$name/g; s/\"llama\"/\"$name\"/g" train/train_llama.cpp
} >"$trainer"

# insert FILE PATTERN LINE: LINE after the last line that matches PATTERN.
insert() {
  awk -v pattern="$2" -v line="$3" '{text[NR] = $0} $0 ~ pattern {last = NR}
    END {for (i = 1; i <= NR; ++i) {print text[i]; if (i == last) print line}}' "$1" >"$1.new"
  cat "$1.new" >"$1" && rm "$1.new"
}
insert models/registry.h '^Architecture [a-z0-9_]*_architecture[(][)];' "Architecture ${name}_architecture();"
insert models/registry.cpp '^      [a-z0-9_]*_architecture[(][)],' "      ${name}_architecture(),"

echo "new: wrote $model and $trainer, and added $name to models/registry.h and models/registry.cpp"
echo "     Write your idea into $model, then: make train_$name && build/train_$name --preset arith-quick --dry-run"
echo "     docs/add-a-connection.md goes on from here."

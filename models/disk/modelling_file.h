// The PyTorch module of an architecture as one file for the transformers library, which a saved model carries, so that
// AutoModelForCausalLM.from_pretrained(DIR, trust_remote_code=True) computes it. It is put together from dev/reference,
// whose files the build embeds: there is one version of an architecture in PyTorch.
#pragma once

#include <string>
#include <vector>

#include "models/config.h"

namespace crossply {

// "LimeStatic" of "lime_static", "MhcAndLime" of "mhc+lime": how the architecture's classes begin in Python.
std::string class_stem(const std::string& arch);
// "crossply_lime", "crossply_mhc_and_lime": its model_type.
std::string library_name(const std::string& arch);
// "modeling_crossply_lime", without its ".py"; "" where dev/reference does not have the architecture, or a part of it.
std::string modelling_module(const std::string& arch);
// Its text. The architecture must be in dev/reference.
std::string modelling_file(const std::string& arch);

// Why no modelling file computes this model; "" where one does. Layers that are run several times are the plain
// backbones' there, and a connection with a layer class of its own takes no second norms. The parts of a combination
// must go together whatever their options.
std::string without_modelling_file(const Config& config);

// The architectures whose modelling file a model directory has.
std::vector<std::string> modelling_files_in(const std::string& model_dir);
// Says on standard error, in one line, that `model_dir` has a modelling file that this build does not write. `named` is
// the directory that the user gave: the same one, or its run directory. A process says it once for each.
void note_outdated_modelling_file(const std::string& model_dir, const std::string& named);

}  // namespace crossply

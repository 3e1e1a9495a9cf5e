// The PyTorch module of an architecture as one file for the transformers library, which a saved model carries, so that
// AutoModelForCausalLM.from_pretrained(DIR, trust_remote_code=True) computes it. It is put together from dev/reference,
// whose files the build embeds: there is one version of an architecture in PyTorch.
#pragma once

#include <string>

namespace crossply {

// "LimeStatic" of "lime_static": how the architecture's classes begin in Python.
std::string class_stem(const std::string& arch);
// "modeling_crossply_lime", without its ".py"; "" where dev/reference does not have the architecture.
std::string modelling_module(const std::string& arch);
// Its text. The architecture must be in dev/reference.
std::string modelling_file(const std::string& arch);

}  // namespace crossply

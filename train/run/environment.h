// environment.jsonl of a run: where, with what and how it was started, each time.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "train/step/trainer.h"

namespace crossply {

// Adds a line, of rank 0's machine: time, command line, commit, compiler, CPU, memory, device and its driver, ranks and
// their library; steps and tokens done before, what account() says, the devices' peak; how many validation files there
// are, and how many of them are training files. No name of a host or a user, but where a path of the command line has
// it. Throws Exit::io, Exit::bad_data for what is not a regular file.
void record_environment(const std::string& path, const TrainPlan& plan, const Trainer& trainer, const Dataset& data);
// CPU and commit, of what recorded_environment() returns and of this process: "AMD EPYC, family 26, model 2, commit
// 1cd692dba734".
std::string origin_of(const nlohmann::json& environment);
std::string this_origin();
// Of this process, word by word; empty where the system does not keep it.
std::vector<std::string> command_line();
// What built the program of the last line, and on which machine and device it ran: "build", "machine", "device"; null
// where there is no such line.
nlohmann::json recorded_environment(const std::string& path);
// FLOP per token, forward and backward, as the last line that has it says; NaN where none does.
double recorded_flops_per_token(const std::string& path);
// The validation files, and those of them that were training files, too, as the last line that has them says; zeros
// where none does.
struct ValidationFiles {
  int64_t all = 0, trained_on = 0;
};
ValidationFiles recorded_validation_files(const std::string& path);

}  // namespace crossply

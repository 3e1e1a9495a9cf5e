// What compare's command line says, and so does each table of a sweep's plan, and the comparison that this makes.
#pragma once

#include <functional>
#include <string>

#include "train/lab/comparison.h"

namespace CLI {
class App;
}

namespace crossply {

// Flags of a comparison: those of training, several rates and seeds, and what a comparison alone has.
void add_experiment_flags(CLI::App& app, Experiment& experiment);
// After parsing. decided: as complete_flags() has it. Refuses what is for the trainers alone.
void complete_experiment(CLI::App& app, Experiment& experiment, bool decided);
// The comparison, with the runs in the order of --arch, of which none is done. claim: gives it a directory that nobody
// else has, before anything looks into it; it is not called for --dry-run. Refuses here what would only fail after
// hours of training.
Comparison plan_comparison(Experiment& experiment, const std::function<std::string(const TrainPlan& plan)>& claim);
// Throws Exit::device where the device is not there, or too small for one of the arms.
void check_device(const Comparison& comparison);

}  // namespace crossply

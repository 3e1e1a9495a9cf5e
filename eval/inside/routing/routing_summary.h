// What a training run says of its routing: the numbers of analyze --what routing, for a line of metrics.jsonl.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "data/source.h"
#include "engine/params.h"
#include "models/config.h"

namespace crossply {

// Whether an architecture has connections across depth that training changes.
bool has_learned_routing(const Config& config);

// {"numbers": {..}, "curves": {..}, "maps": {..}}, under the names of routing.json, of the model as it is:
//   numbers   one number each
//   curves    a number for each layer or stream; null where there is none
//   maps      the first maps of routing.json: a row for each reader, without the sources that it cannot read
// Where tokens have weights of their own: means over a few sequences, evenly spread over the source and always the
// same, of routing_summary_tokens tokens. documents: attention stays within them. The parameters' f32 values must be
// there. Throws Exit::not_finite as a Probe does.
nlohmann::json routing_summary(Device& device, ParameterTable& params, const Config& config, const Source& source,
                               const DocumentMark& documents);
constexpr int64_t routing_summary_tokens = 2048;

}  // namespace crossply

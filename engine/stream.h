// Stream: where a kernel runs. The last argument of every kernel.
#pragma once

namespace crossply {

enum class Backend {
  reference,  // the plain templated loops of kernels/*.h, in f64 or f32: slow, and the meaning of every op
  cpu,        // vectorised and threaded, f32
};

struct Stream {
  Backend backend = Backend::cpu;
};

}  // namespace crossply

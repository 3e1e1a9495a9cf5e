#include "train/step/fault.h"

#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <string>
#include <thread>

#include "engine/check.h"
#include "engine/numbers.h"

namespace crossply {
namespace {

struct Fault {
  int64_t rank = -1, step = 0;
  std::string what;
  double number = 0;  // behind the =
};

Fault parse_fault(const std::string& text) {
  const size_t first = text.find(':'), second = text.find(':', first + 1), equal = text.find('=');
  const auto rank = parse_integer(text.substr(0, first));
  const auto step = parse_integer(text.substr(std::min(first, text.size() - 1) + 1, second - first - 1));
  const std::string what = second == text.npos ? "" : text.substr(second + 1, equal - second - 1);
  const auto number = equal == text.npos ? std::optional(0.0) : parse_number(text.substr(equal + 1));
  const bool with_number = what == "slow" || what == "exit";
  const bool known = with_number || what == "kill" || what == "stop" || what == "hang" || what == "nan";
  if (!rank || !step || !number || !known || with_number != (equal != text.npos) || *number < 0 || *number > 255)
    fail(Exit::usage, "CROSSPLY_FAULT is \"", text, "\", not rank:step:kill|stop|hang|nan|slow=S|exit=N");
  return {*rank, *step, what, *number};
}

}  // namespace

bool inject_fault(const World& world, int64_t step) {
  const char* text = std::getenv("CROSSPLY_FAULT");
  if (text == nullptr || *text == '\0') return false;
  const Fault fault = parse_fault(text);
  if (fault.rank != world.rank) return false;
  if (fault.what == "slow" && step >= fault.step)
    std::this_thread::sleep_for(std::chrono::duration<double>(fault.number));
  if (fault.step != step) return false;
  if (fault.what == "kill") ::raise(SIGKILL);
  if (fault.what == "stop") ::raise(SIGSTOP);
  while (fault.what == "hang") ::pause();
  if (fault.what == "exit") fail(static_cast<Exit>(fault.number), "CROSSPLY_FAULT: ", text);
  return fault.what == "nan";
}

}  // namespace crossply

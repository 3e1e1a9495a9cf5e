// Compiled like everything else: its macros say for which CPU that is. It holds data, no instruction.
#include "engine/cpu_check.h"

#define TEXT_OF(word) #word
#define TEXT(macro) TEXT_OF(macro)
#define IS_ONE(macro, name) TEXT(macro)[0] == '1',

namespace crossply {

extern constexpr bool built_for[] = {CROSSPLY_INSTRUCTION_SETS(IS_ONE)};

}  // namespace crossply

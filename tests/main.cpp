#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include "cli/spin.h"

int main(int argc, char** argv) {
  crossply::bound_spinning(argv);
  return doctest::Context(argc, argv).run();
}

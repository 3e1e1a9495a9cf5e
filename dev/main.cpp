// The main of every program: its own is compiled under the program's name, so that tests can call it too
// (CMakeLists.txt).
int PROGRAM(int argc, char** argv);

int main(int argc, char** argv) { return PROGRAM(argc, argv); }

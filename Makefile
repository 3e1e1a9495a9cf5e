# The front door: `make help` lists what there is. CMakeLists.txt does the building.
BUILD ?= build
JOBS ?= $(shell nproc 2>/dev/null || sysctl -n hw.ncpu)

# One thing after the other here, whatever -j says; the compilations run JOBS at a time.
.NOTPARALLEL:
# Told again each time, so that another CXX also takes effect in a build directory that knows one already.
COMPILER := $(if $(filter-out default undefined,$(origin CXX)),-DCMAKE_CXX_COMPILER="$(CXX)")
# make CUDA=1: with the CUDA backend also where there is no GPU. Expanded where it is used: a rule may set CUDA.
CUDA_FLAG = $(if $(filter 1,$(CUDA)),-DCROSSPLY_CUDA=ON)
# The flags of this make are not meant for those that CMake calls.
COMPILE = env -u MAKEFLAGS -u MAKELEVEL cmake --build $(BUILD) -j $(JOBS)
# Homebrew keeps OpenMP where CMake does not look by itself.
ifeq ($(shell uname),Darwin)
export OpenMP_ROOT ?= $(shell brew --prefix libomp)
endif

PROGRAMS := $(strip $(basename $(notdir $(wildcard train/train_*.cpp))) lime_by_hand average transplant compare sweep curves \
  evaluate generate gradients analyze prepare score tokenize tests)
FUZZ_SECONDS ?= 120
ARCHITECTURES ?= 90a-real;90-virtual

.PHONY: all build run compare-all inheritune text figures test test-second test-all test-one install uninstall tests_of_mpi fuzz fuzz_targets faults fault_injection bench bench-architectures bench-gpu \
        count tidy pack test-arm check-macos setup new configure clean help $(PROGRAMS)
all: build

build: configure
	@$(COMPILE)

# quick_start: compare, before the other architectures are compiled. What the output recommends next is compiled while it
# trains, by what it leaves of the cores. The numbers at the end are those of README's table.
run: setup configure
	@$(COMPILE) --target quick_start
	@nice -n 19 $(COMPILE) --target generate compare >$(BUILD)/generate.log 2>&1 & rest=$$!; \
	echo "$(BUILD)/quick_start --out runs/compare"; $(BUILD)/quick_start --out runs/compare; code=$$?; \
	if kill -0 $$rest 2>/dev/null; then echo "Compiling $(BUILD)/generate and $(BUILD)/compare, which come next ..."; fi; \
	wait $$rest || cat $(BUILD)/generate.log; exit $$code
	@echo "One run differs by processor and seed. Accuracy of answers over five seeds:"
	@echo "LLaMA 18.8 ± 11.8 %, LIMe 58.9 ± 7.8 % (mean ± standard deviation)."

# Long enough for the curves to part, with 3 operators; a fair trial is `$(BUILD)/compare --arch all --preset arith --out DIR`.
compare-all: setup configure
	@$(COMPILE) --target compare generate
	$(BUILD)/compare --arch all --preset arith-quick --data arith:3 --steps 3000 --warmup 150 --lr 3e-3 \
	  --eval-every 1000 --save-every 3000 --out runs/compare-all

# The Inheritune paper in small, with three seeds; TEXT=my.txt: on another text than the project's own sources.
OUT ?= runs/inheritune
inheritune: setup configure
	@$(COMPILE) --target train_gpt2 train_inheritune transplant curves analyze
	@BUILD=$(BUILD) SEEDS="$(SEEDS)" dev/inheritune.sh $(OUT) $(TEXT)

# A corpus of real English text out of free packages of Debian: $(DIR)/train.jsonl and more (docs/training.md).
DIR ?= text
text:
	@python3 dev/text/make_text.py $(DIR)

# The pictures and tables of dev/experiments from the records there; dev/experiments/run.sh makes the records.
figures: setup configure
	@$(COMPILE) --target figures
	$(BUILD)/figures

bench: configure
	@$(COMPILE) --target bench
	$(BUILD)/bench $(ARGS)

bench-architectures: configure
	@$(COMPILE) --target bench
	$(BUILD)/bench architectures $(ARGS)

# Everything that needs a GPU, in one go: the kernels and models against the CPU's, at real sizes in a process of their
# own, then their speed, which a failing test does not keep anybody from knowing.
bench-gpu: CUDA = 1
bench-gpu: configure
	@$(COMPILE) --target bench tests
	@$(BUILD)/tests '-tce=real sizes: *'; tests=$$?; \
	$(BUILD)/tests '-tc=real sizes: *'; real=$$?; [ $$tests != 0 ] || tests=$$real; \
	$(BUILD)/bench gpu --rounds 3 --json $(BUILD)/gpu.json $(ARGS); bench=$$?; \
	echo "exit codes: tests $$tests, bench $$bench"; [ $$tests = 0 ] && exit $$bench || exit $$tests

# The first tier: whatever finds a wrong number or a lost file, in minutes.
test: setup configure
	@$(COMPILE) --target all quick_start tests fault_injection
	@ctest --test-dir $(BUILD) --output-on-failure -LE second -j $(JOBS) $(ARGS); code=$$?; \
	tests/times.sh show $(BUILD); exit $$code

# The second: what takes long. bench and the fuzz targets, too, so that what nobody runs here is compiled here.
test-second: setup configure
	@$(COMPILE) --target all tests tests_of_mpi fuzz_targets fault_injection bench coordinates
	@tests/second_tier.sh $(BUILD) $(JOBS) $(END); code=$$?; tests/times.sh show $(BUILD); exit $$code

test-all: test test-second

# One file of cases alone, compiled and run: make test-one TEST=test_gate ARGS="--test-case='*f32*'".
test-one: TEST_FLAG = -DCROSSPLY_TEST=$(TEST)
test-one: configure
	@$(COMPILE) --target test_one
	@$(BUILD)/test_one $(ARGS)

# DESTDIR, too, for those who make packages.
PREFIX ?= /usr/local
install: build
	@cmake --install $(BUILD) --prefix "$(PREFIX)"

uninstall:
	@cmake -DPREFIX="$(PREFIX)" -P dev/uninstall.cmake

# For machines without a compiler: in a build directory of its own, and tried in an empty root.
pack:
	@cmake -S . -B $(BUILD)-pack -DCROSSPLY_PACK=ON $(COMPILER) $(CMAKE_FLAGS) >/dev/null \
	  $(if $(filter 0,$(CUDA)),-DCROSSPLY_CUDA=OFF,-DCROSSPLY_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES="$(ARCHITECTURES)")
	@env -u MAKEFLAGS -u MAKELEVEL cmake --build $(BUILD)-pack -j $(JOBS) --target pack
	@tests/system/test_pack.sh $(BUILD)-pack || [ $$? = 77 ]

# Every reader with as many inputs as there is time for, under the sanitizers; in a build directory of its own.
fuzz:
	@tests/fuzz/long.sh $(BUILD)-fuzz $(FUZZ_SECONDS)

# Every call of a tiny run fails once, and the run is killed at every one.
faults: build fault_injection
	$(BUILD)/fault_injection $(BUILD) $(BUILD)/libfault_preload.so

$(PROGRAMS) tests_of_mpi fuzz_targets fault_injection: configure
	@$(COMPILE) --target $@

# Lines by room; SINCE=COMMIT: and how they changed.
count:
	@dev/count.sh $(SINCE)

# The checks of .clang-tidy; ROOMS="models data" for some rooms only. It sees files one by one.
tidy:
	@cmake -S . -B $(BUILD)-tidy -DCROSSPLY_UNITY=OFF $(COMPILER) $(CMAKE_FLAGS) >/dev/null
	@tests/tidy.sh $(BUILD)-tidy $(ROOMS) || [ $$? = 77 ]

# On Linux for two others: ARM, emulated, and macOS, which no Linux can run. In build directories of their own.
test-arm: train_lime
	@CMAKE_FLAGS="$(CMAKE_FLAGS)" JOBS=$(JOBS) tests/arm/test.sh $(BUILD)-arm $(BUILD) || [ $$? = 77 ]

check-macos: configure
	@JOBS=$(JOBS) tests/macos.sh $(BUILD)-macos $(BUILD) || [ $$? = 77 ]

# MPI is for those who have time for it.
SETUP_FLAGS = --mpi
run compare-all inheritune figures: SETUP_FLAGS =
setup:
	@dev/setup.sh $(SETUP_FLAGS)

new:
	@dev/new_architecture.sh "$(ARCH)"

# Where CMake fails, dev/setup.sh may know why in one line.
configure:
	@said=$$(cmake -S . -B $(BUILD) $(COMPILER) $(CUDA_FLAG) $(TEST_FLAG) $(CMAKE_FLAGS) 2>&1 >/dev/null); code=$$?; \
	[ $$code = 0 ] || dev/setup.sh --check || exit 1; [ -z "$$said" ] || echo "$$said" >&2; exit $$code

clean:
	cmake -E rm -rf $(BUILD)

help:
	@echo "make          build everything into $(BUILD)/"
	@echo "make run      build one program, then train LLaMA and LIMe on the same data for two minutes and compare them"
	@echo "make compare-all   the same with every architecture, more briefly: four minutes"
	@echo "make inheritune   the Inheritune paper in small, three seeds (SEEDS=1: one; TEXT=my.txt: on your text; OUT=DIR)"
	@echo "make figures  the pictures and tables of dev/experiments, from the records there"
	@echo "make test     build, then run the tests that take minutes (ARGS=\"-L kernels\": those with a label)"
	@echo "make test-all     these, then the second tier, which takes longer; make test-second: that alone"
	@echo "make test-one TEST=test_gate   compile and run one file of tests"
	@echo "make fuzz     every reader with mutated input under the sanitizers, FUZZ_SECONDS=120 for each of them"
	@echo "make faults   every system call of a tiny run fails once, and the run is killed at every one"
	@echo "make bench    build, then measure this machine, the ops and training steps (ARGS=\"steps --models iii\")"
	@echo "make bench-architectures   build, then measure what each architecture costs (ARGS=\"--arch lime --seq 256\")"
	@echo "make bench-gpu   build with CUDA, run the tests, then measure a GPU (ARGS=\"--only attention,steps\")"
	@echo "make install  build, then install \`crossply\` into PREFIX=/usr/local; make uninstall PREFIX=... removes it"
	@echo "make pack     one file to carry to machines without compiler and CUDA toolkit: $(BUILD)-pack/crossply-*.tar.xz"
	@echo "              (ARCHITECTURES=\"80-real;90a-real;100\": for other GPUs than Hopper's; CUDA=0: for CPUs alone)"
	@echo "make count    lines of code by room (SINCE=COMMIT: and what changed)"
	@echo "make tidy     clang-tidy over every room but kernels/ (ROOMS=models: over one)"
	@echo "make test-arm     for Linux on ARM, emulated: the tests of the kernels, and a short run with the losses of this machine"
	@echo "make check-macos  compile every file for macOS on Apple silicon; nothing of it is run"
	@echo "make NAME     build one program: $(PROGRAMS)"
	@echo "make new ARCH=NAME   the skeleton of an architecture of your own; docs/add-a-connection.md goes on from there"
	@echo "make setup    install what building needs, and MPI, where that is allowed"
	@echo "make clean    remove $(BUILD)/"
	@echo "Variables: CXX=clang++ (compiler), BUILD=dir (where to build), JOBS=n (compilations at a time), CUDA=1 (for GPUs),"
	@echo "           CMAKE_FLAGS=-DCROSSPLY_SANITIZE=ON (or any other option of CMakeLists.txt)"

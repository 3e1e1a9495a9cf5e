# Tests and installs crossply for CPUs.  docker build -t crossply . && docker run -v "$PWD:/data" crossply compare --help
# It is compiled for the CPU that builds it. For any x86-64: --build-arg FLAGS=-DCROSSPLY_NATIVE=OFF
FROM debian:12
ARG FLAGS=
RUN apt-get update && apt-get install -y --no-install-recommends make cmake g++ git help2man
COPY dev/setup.sh /crossply/dev/setup.sh
RUN /crossply/dev/setup.sh --mpi
COPY . /crossply
WORKDIR /crossply
RUN make install CMAKE_FLAGS="$FLAGS" && make test CMAKE_FLAGS="$FLAGS"
WORKDIR /data
ENTRYPOINT ["crossply"]
CMD ["--help"]

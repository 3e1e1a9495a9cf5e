// llm.c's side of `bench steps`: its own functions on a GPT-2 with random weights, in place of its main(). Prints
// `ready`, then for each number n that it reads runs n training steps and prints their seconds and the peak resident
// memory in MiB, like bench_torch.py. Compiled and started by dev/bench_llmc.sh; the flags are bench_torch.py's.
#define TESTING  // leaves out llm.c's main()
#include "train_gpt2.c"

static int flag(int argc, char **argv, const char *name) {
    for (int i = 1; i + 1 < argc; i++)
        if (strcmp(argv[i], name) == 0) return atoi(argv[i + 1]);
    fprintf(stderr, "%s is missing\n", name);
    exit(64);
}

static uint32_t random_word(void) {
    static uint64_t state = 1;
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(state >> 33);  // 31 bits
}

static void fill(float *values, size_t count, float value) {
    for (size_t i = 0; i < count; i++) values[i] = value;
}

static double peak_mib(void) {
    char line[256];
    double kib = 0;
    FILE *status = fopen("/proc/self/status", "r");
    while (status != NULL && fgets(line, sizeof line, status) != NULL) sscanf(line, "VmHWM: %lf", &kib);
    if (status != NULL) fclose(status);
    return kib / 1024;
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}

int main(int argc, char **argv) {
    FILE *answers = fdopen(dup(1), "w");
    dup2(2, 1);  // llm.c prints, too
    GPT2 model;
    memset(&model, 0, sizeof model);
    const int B = flag(argc, argv, "--batch"), T = flag(argc, argv, "--seq"), V = 50257;
    model.config.max_seq_len = 1024;
    model.config.vocab_size = V;
    model.config.padded_vocab_size = flag(argc, argv, "--vocab");
    model.config.num_layers = flag(argc, argv, "--layers");
    model.config.num_heads = flag(argc, argv, "--heads");
    model.config.channels = flag(argc, argv, "--width");

    fill_in_parameter_sizes(model.param_sizes, model.config);
    for (int i = 0; i < NUM_PARAMETER_TENSORS; i++) model.num_parameters += model.param_sizes[i];
    model.params_memory = malloc_and_point_parameters(&model.params, model.param_sizes);
    const float width = 0.02f * 3.4641f;  // of a uniform distribution of that standard deviation
    for (size_t i = 0; i < model.num_parameters; i++)
        model.params_memory[i] = width * (random_word() / 2147483648.0f - 0.5f);
    const size_t C = model.config.channels, L = model.config.num_layers;
    fill(model.params.ln1w, L * C, 1);
    fill(model.params.ln2w, L * C, 1);
    fill(model.params.lnfw, C, 1);

    int *tokens = (int *)malloc(2 * B * T * sizeof(int));
    for (int i = 0; i < 2 * B * T; i++) tokens[i] = random_word() % V;
    fprintf(answers, "ready\n");
    fflush(answers);
    int step = 0;
    for (int steps; scanf("%d", &steps) == 1;) {
        const double start = now();
        for (int i = 0; i < steps; i++) {
            gpt2_forward(&model, tokens, tokens + B * T, B, T);
            gpt2_zero_grad(&model);
            gpt2_backward(&model);
            gpt2_update(&model, 1e-4f, 0.9f, 0.999f, 1e-8f, 0.0f, ++step);
        }
        fprintf(answers, "%f %f\n", now() - start, peak_mib());
        fflush(answers);
        fprintf(stderr, "llm.c: loss %f after step %d\n", model.mean_loss, step);
    }
    free(tokens);
    gpt2_free(&model);
    return 0;
}

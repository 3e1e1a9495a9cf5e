# For scripts about tokens: a tokenizer.json, and what shards hold; source it after expect.sh.
# shellcheck shell=bash

# Prints one of the 256 bytes, an end-of-text token (256) and two merges: "th" (257) and "the" (258).
tiny_tokenizer() {
  awk 'BEGIN {
    for (b = 0; b < 256; b++) {
      prints = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174
      code = prints ? b : 256 + extra++
      vocab = vocab sprintf("\"\\u%04x\": %d, ", code, b)
    }
    print "{\"added_tokens\": [{\"id\": 256, \"content\": \"<|endoftext|>\", \"special\": true, \"single_word\": false,",
      "\"lstrip\": false, \"rstrip\": false, \"normalized\": false}],"
    print "\"normalizer\": null, \"post_processor\": null, \"decoder\": {\"type\": \"ByteLevel\", \"add_prefix_space\": true,",
      "\"trim_offsets\": true, \"use_regex\": true},"
    print "\"pre_tokenizer\": {\"type\": \"ByteLevel\", \"add_prefix_space\": false, \"trim_offsets\": true, \"use_regex\": true},"
    print "\"model\": {\"type\": \"BPE\", \"vocab\": {" vocab "\"<|endoftext|>\": 256, \"th\": 257, \"the\": 258}, \"merges\": [\"t h\", \"th e\"]}}"
  }'
}

# ids FILE: of a shard of uint16 tokens.
ids() { tail -c +1025 "$1" | od -An -v -tu2 -w2 | tr -d ' ' | paste -sd' ' -; }
# same DIR DIR: the same files with the same bytes, but for the paths and packings of their sources.
same() { diff -r -x manifest.json "$1" "$2" >output 2>&1 || fail "$1 and $2 differ"; }

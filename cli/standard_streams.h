// The process's standard streams. What a program says is a convenience: its files are complete without it.
//
// * A stream that is closed at the start is opened on the null device, so that no file of ours gets its number and with
//   it what is printed: closing one is the user's wish, not an error.
// * A reader that goes away (`| head -1`) is no error: what prints and nothing else ends, with Exit::done and no
//   message; what has a file to write, or a model to train, goes on to its end.
// * Standard output that cannot be written otherwise, a full disk, is Exit::io.
#pragma once

#include <string>

namespace crossply {

// First thing in a program. Also has the system report a closed pipe and a file-size limit as errors, not by signals.
void prepare_standard_streams();

// Thrown to end a program that only prints, when nobody reads any more.
struct ReaderGone {};

// Brings to standard output what was printed. Throws ReaderGone, or Exit::io.
void flush_standard_output();

// "note: TEXT" as a line of standard error, safe for a terminal.
void say_note(const std::string& text);

// Whether a stream is a terminal that moves its cursor: an editor's shell says TERM=dumb and would show the codes.
bool takes_escape_codes(int fd);

}  // namespace crossply

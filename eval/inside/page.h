// What `analyze --what all` writes for readers: one HTML file with every picture and its captions, which needs nothing
// from elsewhere, runs no script, and is the same bytes for the same findings.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "eval/inside/analysis.h"

namespace crossply {

struct PageModel {
  std::string name;
  std::vector<std::pair<std::string, std::string>> facts;  // in the same order for all models
  int look = 0;                                            // of its curves
};

struct PageSection {
  std::string name, about;  // of the analysis
  std::optional<Finding> finding;
  std::string windows;                                        // that it looked at
  std::vector<std::pair<std::string, std::string>> left_out;  // models, and why
  std::vector<std::string> files;                             // beside NAME.json, .csv and .svg
};

struct Page {
  std::string command;  // that makes it again
  std::string data;
  uint64_t seed = 0;
  std::vector<PageModel> models;
  std::vector<PageSection> sections;
  size_t analyses = 0;  // when all are done; more than there are sections: the page says so
};

// What the head of a page says of a model.
PageModel page_model(const Subject& subject, int look);

// The file's contents. Text may be any bytes.
std::string page_html(const Page& page);

// Throws Exit::usage unless DIR/report.html may be written: there is none, or one of ours.
void check_page_out(const std::string& dir);
// Writes it. Returns what was written, for the terminal.
std::string write_page(const std::string& dir, const Page& page);

}  // namespace crossply

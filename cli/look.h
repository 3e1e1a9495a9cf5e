// Which colour, dash and mark a curve has: an architecture has the same ones in every figure.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace crossply {

// Seven colours and four dashes have no common factor, so 28 looks differ.
constexpr size_t number_of_looks = 28;

const char* colour_of_look(size_t look);
const char* dash_of_look(size_t look);  // of stroke-dasharray; "" is a solid line
// The mark of a look: 0 disc, 1 square, 2 triangle, 3 diamond.
size_t mark_of_look(size_t look);

// The same colour with the next dash but n - 1, such as of a model's second line; up to 3.
int same_colour(int look, int n);

// The look of an architecture, from 0; -1 for a name that the table does not have.
int look_of_architecture(const std::string& arch);

// One for each curve of a figure, all different up to 28. A name begins with its architecture: "lime", "lime lr 0.001",
// "lime:window=2". A variant has its architecture's colour and another dash; other names take what nobody else has.
std::vector<int> looks_of(const std::vector<std::string>& names);

}  // namespace crossply

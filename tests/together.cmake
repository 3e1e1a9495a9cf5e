# Writes OUT, which compiles FILES (a list with commas) together: first the headers of all, then each file in a namespace
# of its own, where its names do not meet those of another file.
#   cmake -DOUT=FILE -DFILES=a.cpp,b.cpp -P tests/together.cmake
string(REPLACE "," ";" FILES "${FILES}")
set(cases)
foreach(file IN LISTS FILES)
  file(STRINGS ${file} lines REGEX "^#include")
  list(APPEND includes ${lines})
  get_filename_component(name ${file} NAME_WE)
  string(APPEND cases "namespace cases_of_${name} {\n#include \"${file}\"\n}\n")
endforeach()
list(REMOVE_DUPLICATES includes)
list(JOIN includes "\n" includes)
file(WRITE ${OUT} "${includes}\n\n${cases}")

# Writes OUT, which says VERSION and the commit that SOURCE is at; touches it only when that changed.
#   cmake -DSOURCE=DIR -DOUT=FILE -DVERSION=NUMBER -P dev/commit.cmake
get_filename_component(above ${SOURCE} DIRECTORY)
set(ENV{GIT_CEILING_DIRECTORIES} ${above})  # unpacked inside another repository, it is not at that one's commit
execute_process(COMMAND git describe --always --dirty --abbrev=12 WORKING_DIRECTORY ${SOURCE}
                OUTPUT_VARIABLE commit ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE failed)
if(failed)
  set(commit unknown)
endif()
set(text "#include <string>\nnamespace crossply {\nstd::string commit() { return \"${commit}\"; }\n")
string(APPEND text "std::string version() { return \"${VERSION}, commit ${commit}\"; }\n}\n")
set(old "")
if(EXISTS ${OUT})
  file(READ ${OUT} old)
endif()
if(NOT text STREQUAL old)
  file(WRITE ${OUT} "${text}")
endif()

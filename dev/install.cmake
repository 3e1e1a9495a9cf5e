# What `make install` and `cmake --install` install, and `pip install .`; CMakeLists.txt includes it.
#   bin/crossply          a link to libexec/crossply/crossply: `crossply train_lime --out runs/lime`
#   libexec/crossply/     the one file, a link to it for each program, the plugin for lm-evaluation-harness
#   share/                LICENSE and NOTICE, completions for bash and zsh, man pages where help2man is here
if(SKBUILD)
  set(home crossply)  # inside the Python package
else()
  set(home libexec/crossply)
  # What an older version installed goes first.
  install(CODE "set(PREFIX \"\${CMAKE_INSTALL_PREFIX}\")
if(EXISTS \"\$ENV{DESTDIR}\${PREFIX}/${home}/files.txt\")
  include(\"${CMAKE_SOURCE_DIR}/dev/uninstall.cmake\")
endif()")
endif()
install(TARGETS one_file RUNTIME DESTINATION ${home})
if(TARGET comm_mpi)
  install(TARGETS comm_mpi LIBRARY DESTINATION ${home})
endif()
install(PROGRAMS eval/lm_eval_crossply.py DESTINATION ${home})
install(DIRECTORY eval/tasks DESTINATION ${home} PATTERN __pycache__ EXCLUDE)
if(SKBUILD)
  return()
endif()

# Links are installed as they are. They point to nothing in the build directory.
set(links ${CMAKE_BINARY_DIR}/links)
file(REMOVE_RECURSE ${links})
file(MAKE_DIRECTORY ${links}/bin)
file(CREATE_LINK ../${home}/crossply ${links}/bin/crossply SYMBOLIC)
foreach(name ${names})
  file(CREATE_LINK crossply ${links}/${name} SYMBOLIC)
  list(APPEND program_links ${links}/${name})
endforeach()
install(FILES ${links}/bin/crossply DESTINATION bin)
install(FILES ${program_links} DESTINATION ${home})
install(FILES LICENSE dev/NOTICE DESTINATION share/doc/crossply)
install(FILES dev/completion.bash DESTINATION share/bash-completion/completions RENAME crossply)
install(FILES dev/completion.zsh DESTINATION share/zsh/site-functions RENAME _crossply)

find_program(HELP2MAN help2man)
install(CODE "set(HELP2MAN \"${HELP2MAN}\")\nset(PROGRAMS \"${names}\")")
install(SCRIPT dev/install_last.cmake)

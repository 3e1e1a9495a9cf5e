# Writes OUT, which holds those files of the directory REFERENCE that a modelling file for transformers is made of
# (models/modelling_file.h).
#   cmake -DREFERENCE=DIR -DOUT=FILE -P dev/embed_reference.cmake
file(GLOB files ${REFERENCE}/*.py)
list(SORT files)
set(text "#include \"models/modelling_file.h\"\n\nnamespace crossply {\n\n")
string(APPEND text "const std::map<std::string, std::string>& reference_files() {\n")
string(APPEND text "  static const std::map<std::string, std::string> files = {\n")
foreach(file IN LISTS files)
  get_filename_component(name ${file} NAME)
  file(READ ${file} source)
  if(name MATCHES "^(config|gpt2|llama|hf)\\.py$" OR source MATCHES "\nclass [A-Za-z0-9]+\\(Llama\\):")
    string(APPEND text "      {\"${name}\", R\"reference(${source})reference\"},\n")
  endif()
endforeach()
string(APPEND text "  };\n  return files;\n}\n\n}  // namespace crossply\n")
file(WRITE ${OUT} "${text}")

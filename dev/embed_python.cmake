# Writes OUT, which holds the Python files that programs need where there is no source tree (engine/io/python_files.h): the
# scripts of `prepare`, and those of dev/reference that a modelling file for transformers is made of.
#   cmake -DSOURCE=DIR -DOUT=FILE -P dev/embed_python.cmake
file(GLOB files ${SOURCE}/dev/reference/*.py)
list(SORT files)
set(text "#include \"engine/io/python_files.h\"\n\nnamespace crossply {\n\n")
string(APPEND text "const std::map<std::string, std::string>& python_files() {\n")
string(APPEND text "  static const std::map<std::string, std::string> files = {\n")
foreach(file IN LISTS files ITEMS ${SOURCE}/data/train_tokenizer.py ${SOURCE}/data/parquet_text.py)
  get_filename_component(name ${file} NAME)
  file(READ ${file} source)
  if(name MATCHES "^(combined|config|engram|gpt2|llama|hf|train_tokenizer|parquet_text)\\.py$" OR source MATCHES "\nclass [A-Za-z0-9]+\\(Llama\\):")
    string(APPEND text "      {\"${name}\", R\"python(${source})python\"},\n")
  endif()
endforeach()
string(APPEND text "  };\n  return files;\n}\n\n}  // namespace crossply\n")
file(WRITE ${OUT} "${text}")

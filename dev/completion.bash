# Completion of `crossply` for bash: programs, then the flags that --help-all of a program lists, then files.
_crossply() {
  local word=${COMP_WORDS[COMP_CWORD]} crossply=${COMP_WORDS[0]} words=
  if [ "$COMP_CWORD" = 1 ]; then
    words="--help --version $("$crossply" --help 2>/dev/null | sed -n '/^Programs:/,$s/^  //p')"
  elif [[ $word == -* ]]; then
    words=$("$crossply" "${COMP_WORDS[1]}" --help-all 2>/dev/null | grep -oE -- '^ +(-h,)?--[a-z0-9-]+' | grep -oE -- '--.*')
  fi
  mapfile -t COMPREPLY < <(compgen -W "$words" -- "$word")
}
complete -o default -F _crossply crossply

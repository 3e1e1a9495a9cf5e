#compdef crossply
# Completion of `crossply` for zsh: programs, then the flags that --help-all of a program lists, then files.
local crossply=$words[1]
if (( CURRENT == 2 )); then
  compadd -- --help --version $("$crossply" --help 2>/dev/null | sed -n '/^Programs:/,$s/^  //p')
elif [[ $words[CURRENT] == -* ]]; then
  compadd -- $("$crossply" "$words[2]" --help-all 2>/dev/null | grep -oE -- '^ +(-h,)?--[a-z0-9-]+' | grep -oE -- '--.*')
else
  _files
fi

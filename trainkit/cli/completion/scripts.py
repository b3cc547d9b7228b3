"""What each shell evaluates: it asks `trainkit completion --query` at each Tab."""

from __future__ import annotations

# Bash breaks words at = and : and replaces the last part only, so that a candidate
# loses what stands before it. (Hydra's script takes = out of COMP_WORDBREAKS, which
# changes how every other command completes.) Where trainkit knows nothing, files.
BASH = r"""_trainkit_complete()
{
    local line="${COMP_LINE:0:$COMP_POINT}" breaks="${COMP_WORDBREAKS//[^=:]/}"
    local word="${line##*[[:space:]]}" prefix="" last candidate
    if [[ -n "$breaks" ]]; then
        last="${word##*[$breaks]}"
        prefix="${word%"$last"}"
    fi
    COMPREPLY=()
    while IFS= read -r candidate; do
        [[ -n "$candidate" ]] && COMPREPLY+=("${candidate#"$prefix"}")
    done < <("$1" completion --query "$line" 2>/dev/null)
    if [[ "${#COMPREPLY[@]}" -eq 1 && "${COMPREPLY[0]}" == *[=./] ]]; then
        compopt -o nospace 2>/dev/null
    fi
}
complete -o default -F _trainkit_complete trainkit
"""

ZSH = r"""_trainkit_complete()
{
    local candidate
    local -a whole begun
    for candidate in ${(f)"$(${words[1]} completion --query \
        "${(j: :)words[1,CURRENT-1]} $PREFIX" 2>/dev/null)"}; do
        case $candidate in
            *[=./]) begun+=($candidate) ;;
            *) whole+=($candidate) ;;
        esac
    done
    if (( $#whole + $#begun == 0 )); then
        _files
        return
    fi
    compadd -a whole
    compadd -S '' -a begun
}
if (( ! $+functions[compdef] )); then
    autoload -Uz compinit
    compinit -D
fi
compdef _trainkit_complete trainkit
"""

# Fish adds no space behind = . and / by itself.
FISH = r"""function __trainkit_complete
    set -l found (trainkit completion --query (commandline -cp | string collect) \
        2>/dev/null)
    if test -n "$found"
        printf '%s\n' $found
    else
        __fish_complete_path (commandline -ct)
    end
end
complete -c trainkit -f -a '(__trainkit_complete)'
"""

SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}
"""By the shell's name."""

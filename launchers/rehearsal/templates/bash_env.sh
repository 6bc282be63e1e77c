# Read by every script of bash, as at sites whose `module` is a function of the shell.
case ":$PATH:" in *":@folder@/shims:"*) ;; *) PATH="@folder@/shims:$PATH" ;; esac

rehearsal_record() { # in one write, so that nodes do not mix their lines
  local line; printf -v line '\t%s' "$@"
  printf '%s\n' "$(hostname)$line" >> "@folder@/calls"
}
module() { rehearsal_record module "$@"; }
conda() {
  rehearsal_record conda "$@"
  if [ "$1" = activate ]; then export PATH="$2/bin:$PATH" CONDA_PREFIX="$2"; fi
}

/* The options that Shifter's plugin adds to sbatch and srun: --image and --module. They are read and left at that.
 * Slurm's headers may be missing where Slurm is not: what is used of slurm/spank.h stands here. */
struct spank_option {
  char *name, *arginfo, *usage;
  int has_arg, val;
  int (*callback)(int, const char *, int);
};
extern int spank_option_register(void *spank, struct spank_option *option);

const char plugin_name[] = "shifter";
const char plugin_type[] = "spank";
const unsigned int plugin_version = SLURM_VERSION;
const unsigned int spank_plugin_version = 1;

static int read_it(int value, const char *text, int remote) { return 0; }

static struct spank_option options[] = {
  {"image", "IMAGE", "container image to use", 1, 1, read_it},
  {"module", "NAMES", "modules of the container's host to bring in", 1, 2, read_it},
};

int slurm_spank_init(void *spank, int count, char **words) {
  spank_option_register(spank, &options[0]);
  spank_option_register(spank, &options[1]);
  return 0;
}

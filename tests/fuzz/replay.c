/* A main for the fuzz targets without libFuzzer: runs each file that is named, and of each folder
 * that is named every file in it, once. */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

#include "fuzz.h"

static long replayed_count;

static void replay_file(const char *path) {
  FILE *file = fopen(path, "rb");
  struct stat about;
  if (!file || fstat(fileno(file), &about) != 0) {
    fprintf(stderr, "%s: cannot be read\n", path);
    exit(2);
  }
  /* Exactly as long as the input, so that a byte too far is seen. */
  size_t size_bytes = (size_t)about.st_size;
  uint8_t *data = malloc(size_bytes > 0 ? size_bytes : 1);
  if (!data || fread(data, 1, size_bytes, file) != size_bytes) exit(2);
  fclose(file);
  LLVMFuzzerTestOneInput(data, size_bytes);
  free(data);
  replayed_count += 1;
}

static void replay_folder(DIR *folder, const char *path) {
  for (struct dirent *entry = readdir(folder); entry; entry = readdir(folder)) {
    char name[4096];
    if (entry->d_name[0] == '.') continue;
    snprintf(name, sizeof name, "%s/%s", path, entry->d_name);
    replay_file(name);
  }
}

int main(int argument_count, char **arguments) {
  for (int k = 1; k < argument_count; ++k) {
    DIR *folder = opendir(arguments[k]);
    if (folder) {
      replay_folder(folder, arguments[k]);
      closedir(folder);
    } else {
      replay_file(arguments[k]);
    }
  }
  printf("%ld inputs replayed\n", replayed_count);
  return replayed_count > 0 ? 0 : 1;
}

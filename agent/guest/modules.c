/* Loads the modules of the initramfs, in the order of their names. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "guest.h"

#define FOLDER "/modules/"

static void load(const char *name)
{
    char path[300];
    snprintf(path, sizeof path, FOLDER "%s", name);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || (syscall(SYS_finit_module, fd, "", 0) < 0 && errno != EEXIST))
        die(path);
    close(fd);
    unlink(path);
}

void load_modules(void)
{
    struct dirent **names;
    int count = scandir(FOLDER, &names, NULL, alphasort);
    if (count < 0)
        die(FOLDER);
    for (int i = 0; i < count; i++) {
        if (names[i]->d_name[0] != '.')
            load(names[i]->d_name);
        free(names[i]);
    }
    free(names);
}

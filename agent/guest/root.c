/* The sandbox's root, of the machine's disks: the first has the image and is read-only, the second is the sandbox's. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "guest.h"

#define OVERLAY "redirect_dir=on,metacopy=off,index=off,nfs_export=off,xino=auto"
enum { TRIES = 2000, PAUSE_US = 5000 };

static void mount_disk(const char *device, const char *where, const char *kind, unsigned long flags, const char *data)
{
    struct stat st;
    for (int i = 0; stat(device, &st) < 0; i++) { /* the driver finds it in its own time */
        if (i == TRIES)
            die(device);
        usleep(PAUSE_US);
    }
    if (mkdir(where, 0700) < 0 || mount(device, where, kind, flags, data) < 0)
        die(where);
}

/* Makes what a mount is laid over, and no link on the way: a sandbox that was stopped may have put one there. */
static void make_point(const char *inside, bool file)
{
    char path[512];
    snprintf(path, sizeof path, ROOT "%s", inside);
    for (char *end = path + strlen(ROOT); end;) {
        end = strchr(end + 1, '/');
        if (end)
            *end = 0;
        struct stat st;
        bool wanted_file = file && !end;
        if (lstat(path, &st) < 0 || !(wanted_file ? S_ISREG(st.st_mode) : S_ISDIR(st.st_mode))) {
            if (unlink(path) < 0 && errno == EISDIR)
                rmdir(path);
            int fd = wanted_file ? open(path, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0644) : mkdir(path, 0755);
            if (fd < 0)
                die(path);
            if (wanted_file)
                close(fd);
        }
        if (end)
            *end = '/';
    }
}

static void bind_to(const char *source, const char *inside, unsigned long flags)
{
    char path[512];
    snprintf(path, sizeof path, ROOT "%s", inside);
    if (mount(source, path, NULL, MS_BIND, NULL) < 0 || mount(NULL, path, NULL, MS_BIND | MS_REMOUNT | flags, NULL) < 0)
        die(path);
}

static void bind_listed(const char *list)
{
    char path[256], source[300];
    while (*list) {
        size_t length = strcspn(list, ",");
        snprintf(path, sizeof path, "%.*s", (int)length, list);
        snprintf(source, sizeof source, "/base%s", path);
        make_point(path, false);
        bind_to(source, path, MS_RDONLY | MS_NOSUID | MS_NODEV);
        list += length + (list[length] == ',');
    }
}

static void write_resolver(const char *server)
{
    char text[128];
    const char *path = ROOT "/etc/resolv.conf";
    struct stat st;
    if (lstat(ROOT "/etc", &st) < 0 || !S_ISDIR(st.st_mode))
        return; /* the sandbox did away with it: queries are answered whatever address they are sent to */
    unlink(path);
    int fd = open(path, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC | O_NOFOLLOW, 0644);
    int length = snprintf(text, sizeof text, "nameserver %s\noptions edns0 timeout:5 attempts:2\n", server);
    if (fd >= 0) {
        (void)!write(fd, text, (size_t)length);
        close(fd);
    }
}

void make_root(void)
{
    umask(0);
    mount_disk("/dev/vda", "/base", "erofs", MS_RDONLY | MS_NODEV | MS_NOSUID, NULL);
    mount_disk("/dev/vdb", "/disk", "ext4", MS_NODEV | MS_NOSUID | MS_NOATIME, "noinit_itable");
    mkdir(ROOT, 0755);
    const char *binds = option("binds"); /* the image `host`: the disk has the root, the base what lies over it */
    const unsigned long plain = MS_NODEV | MS_NOSUID | MS_NOATIME;
    if (binds ? mount("/disk/root", ROOT, NULL, MS_BIND, NULL) < 0
              : mount("k8e", ROOT, "overlay", plain, OVERLAY ",lowerdir=/base,upperdir=/disk/upper,workdir=/disk/work") < 0)
        die(ROOT);
    static const char *const points[] = {"/proc", "/dev", "/run", "/tmp", "/workspace"};
    for (size_t i = 0; i < sizeof points / sizeof *points; i++)
        make_point(points[i], false);
    make_point("/k8e-agent", true);
    make_point("/k8e-loader.so", true);
    write_resolver(required("dns"));
    if (binds)
        bind_listed(binds);
    bool read_only = number("read_only");
    bind_to(ROOT "/tmp", "/tmp", MS_NOSUID | MS_NODEV);
    bind_to("/disk/workspace", "/workspace", MS_NOSUID | MS_NODEV | (read_only ? MS_RDONLY : 0));
    bind_to("/k8e-agent", "/k8e-agent", MS_RDONLY | MS_NOSUID | MS_NODEV);
    bind_to("/k8e-loader.so", "/k8e-loader.so", MS_RDONLY | MS_NOSUID | MS_NODEV);
    if (read_only && mount(NULL, ROOT, NULL, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NODEV | MS_NOSUID, NULL) < 0)
        die("a read-only root");
}

static void mount_in(const char *kind, const char *where, unsigned long flags, const char *data)
{
    if (mount(kind, where, kind, flags, data) < 0)
        die(where);
}

static void make_devices(void)
{
    static const struct {
        const char *path;
        unsigned major, minor;
    } devices[] = {
        {"/dev/null", 1, 3}, {"/dev/zero", 1, 5},    {"/dev/full", 1, 7},
        {"/dev/tty", 5, 0},  {"/dev/random", 1, 8}, {"/dev/urandom", 1, 9},
    };
    static const char *const links[][2] = {
        {"/proc/self/fd", "/dev/fd"},     {"/proc/self/fd/0", "/dev/stdin"}, {"/proc/self/fd/1", "/dev/stdout"},
        {"/proc/self/fd/2", "/dev/stderr"}, {"pts/ptmx", "/dev/ptmx"},
    };
    mount_in("tmpfs", "/dev", MS_NOSUID | MS_NOEXEC, "mode=755,size=64k");
    for (size_t i = 0; i < sizeof devices / sizeof *devices; i++)
        if (mknod(devices[i].path, S_IFCHR | 0666, makedev(devices[i].major, devices[i].minor)) < 0)
            die(devices[i].path);
    for (size_t i = 0; i < sizeof links / sizeof *links; i++)
        if (symlink(links[i][0], links[i][1]) < 0)
            die(links[i][1]);
    if (mkdir("/dev/pts", 0755) < 0 || mkdir("/dev/shm", 0755) < 0)
        die("/dev");
    mount_in("devpts", "/dev/pts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620");
}

/* What the other runtimes hide of /proc, where it says something of the kernel and not of the sandbox. */
static void cover_proc(void)
{
    static const char *const files[] = {"kallsyms", "kcore", "keys", "timer_list", "sched_debug", "interrupts", "sysrq-trigger"};
    static const char *const folders[] = {"acpi", "scsi"};
    static const char *const kept[] = {"bus", "fs", "irq", "sys"};
    char path[64];
    struct stat st;
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        snprintf(path, sizeof path, "/proc/%s", files[i]);
        if (stat(path, &st) == 0 && mount("/dev/null", path, NULL, MS_BIND, NULL) < 0)
            die(path);
    }
    for (size_t i = 0; i < sizeof folders / sizeof *folders; i++) {
        snprintf(path, sizeof path, "/proc/%s", folders[i]);
        if (stat(path, &st) == 0)
            mount_in("tmpfs", path, MS_RDONLY, "size=0");
    }
    for (size_t i = 0; i < sizeof kept / sizeof *kept; i++) {
        snprintf(path, sizeof path, "/proc/%s", kept[i]);
        if (stat(path, &st) == 0 && (mount(path, path, NULL, MS_BIND, NULL) < 0 ||
                                     mount(NULL, path, NULL, MS_BIND | MS_REMOUNT | MS_RDONLY, NULL) < 0))
            die(path);
    }
}

void enter_root(void)
{
    char memory[64];
    snprintf(memory, sizeof memory, "mode=755,size=%lu", number("shared"));
    if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0 || chdir(ROOT) < 0 ||
        mount(".", "/", NULL, MS_MOVE, NULL) < 0 || chroot(".") < 0 || chdir("/") < 0)
        die("the root");
    mount_in("proc", "/proc", MS_NOSUID | MS_NOEXEC | MS_NODEV, NULL);
    make_devices();
    mount_in("tmpfs", "/run", MS_NOSUID | MS_NODEV | MS_NOEXEC, memory);
    snprintf(memory, sizeof memory, "mode=1777,size=%lu", number("shared"));
    mount_in("tmpfs", "/dev/shm", MS_NOSUID | MS_NODEV, memory);
    cover_proc();
}

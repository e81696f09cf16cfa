/* Connections of the host over vsock. Only the host's: a process of the sandbox that could connect here would have the
 * agent's socket. */
#define _GNU_SOURCE
#include <sys/socket.h>

#include <linux/vm_sockets.h>
#include <unistd.h>

#include "guest.h"

int listen_to_host(unsigned port)
{
    struct sockaddr_vm own = {.svm_family = AF_VSOCK, .svm_port = port, .svm_cid = VMADDR_CID_ANY};
    int fd = socket(AF_VSOCK, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0 || bind(fd, (const void *)&own, sizeof own) < 0 || listen(fd, 8) < 0)
        die("vsock");
    return fd;
}

int accept_host(int listener)
{
    struct sockaddr_vm peer = {0};
    socklen_t size = sizeof peer;
    int fd = accept4(listener, (void *)&peer, &size, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd >= 0 && peer.svm_cid != VMADDR_CID_HOST) {
        close(fd);
        return -1;
    }
    return fd;
}

/* getaddrinfo of the C library this is linked with: prints the addresses, or what went wrong. */
#include <arpa/inet.h>
#include <netdb.h>
#include <stdio.h>
#include <string.h>

int main(int argc, char **argv)
{
    struct addrinfo hints, *found;
    char text[64];
    memset(&hints, 0, sizeof hints);
    hints.ai_socktype = SOCK_STREAM;
    int error = getaddrinfo(argv[argc - 1], NULL, &hints, &found);
    if (error != 0) {
        printf("%s\n", error == EAI_AGAIN ? "again" : "none");
        return 1;
    }
    for (; found != NULL; found = found->ai_next)
        if (getnameinfo(found->ai_addr, found->ai_addrlen, text, sizeof text, NULL, 0, NI_NUMERICHOST) == 0)
            printf("%s\n", text);
    return 0;
}

/* The one network card: addresses, routes and the hardware address of the other end, as for a veth pair on the host. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/if_addr.h>
#include <linux/neighbour.h>
#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <net/if.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "guest.h"

#define CARD "eth0" /* as the kernel calls it */

static struct {
    struct nlmsghdr head;
    char body[512];
} message;

static void begin(uint16_t type, uint16_t flags, const void *body, uint32_t length)
{
    memset(&message, 0, sizeof message);
    message.head.nlmsg_type = type;
    message.head.nlmsg_flags = (uint16_t)(NLM_F_REQUEST | NLM_F_ACK | flags);
    message.head.nlmsg_len = NLMSG_LENGTH(length);
    memcpy(NLMSG_DATA(&message.head), body, length);
}

static void add(uint16_t type, const void *value, uint16_t length)
{
    struct rtattr *attribute = (void *)((char *)&message + NLMSG_ALIGN(message.head.nlmsg_len));
    attribute->rta_type = type;
    attribute->rta_len = (uint16_t)RTA_LENGTH(length);
    memcpy(RTA_DATA(attribute), value, length);
    message.head.nlmsg_len = NLMSG_ALIGN(message.head.nlmsg_len) + (uint32_t)RTA_ALIGN(attribute->rta_len);
}

static void commit(int netlink, const char *what)
{
    static char answer[1024];
    if (send(netlink, &message, message.head.nlmsg_len, 0) < 0 || recv(netlink, answer, sizeof answer, 0) < 0)
        die(what);
    const struct nlmsghdr *head = (void *)answer;
    const struct nlmsgerr *error = NLMSG_DATA(head);
    if (head->nlmsg_type == NLMSG_ERROR && error->error) {
        errno = -error->error;
        die(what);
    }
}

static void bring_up(int netlink, int index)
{
    struct ifinfomsg link = {.ifi_index = index, .ifi_flags = IFF_UP, .ifi_change = IFF_UP};
    begin(RTM_NEWLINK, 0, &link, sizeof link);
    commit(netlink, "bringing an interface up");
}

/* As the wire's inner end is called on every runtime. While it is down. */
static void rename_to(int netlink, int index, const char *name)
{
    struct ifinfomsg link = {.ifi_index = index};
    begin(RTM_NEWLINK, 0, &link, sizeof link);
    add(IFLA_IFNAME, name, (uint16_t)(strlen(name) + 1));
    commit(netlink, name);
}

/* VALUE is INNER,OUTER,PREFIX. */
static void add_end(int netlink, int index, const char *value, const uint8_t *mac)
{
    char inner[64], outer[64];
    int prefix;
    errno = EINVAL;
    if (sscanf(value, "%63[^,],%63[^,],%d", inner, outer, &prefix) != 3)
        die("an address");
    uint8_t family = strchr(inner, ':') ? AF_INET6 : AF_INET, address[16], gateway[16];
    uint16_t length = family == AF_INET ? 4 : 16;
    if (inet_pton(family, inner, address) != 1 || inet_pton(family, outer, gateway) != 1)
        die("an address");
    struct ifaddrmsg own = {.ifa_family = family,
                            .ifa_prefixlen = (uint8_t)prefix,
                            .ifa_flags = family == AF_INET6 ? IFA_F_NODAD : 0,
                            .ifa_index = (uint32_t)index};
    begin(RTM_NEWADDR, NLM_F_CREATE, &own, sizeof own);
    add(IFA_ADDRESS, address, length);
    add(IFA_LOCAL, address, length);
    commit(netlink, "an address");
    struct ndmsg other = {.ndm_family = family, .ndm_ifindex = index, .ndm_state = NUD_PERMANENT};
    begin(RTM_NEWNEIGH, NLM_F_CREATE, &other, sizeof other);
    add(NDA_DST, gateway, length);
    add(NDA_LLADDR, mac, 6);
    commit(netlink, "the other end");
    struct rtmsg route = {.rtm_family = family,
                          .rtm_table = RT_TABLE_MAIN,
                          .rtm_protocol = RTPROT_STATIC,
                          .rtm_type = RTN_UNICAST};
    begin(RTM_NEWROUTE, NLM_F_CREATE, &route, sizeof route);
    add(RTA_GATEWAY, gateway, length);
    add(RTA_OIF, &index, sizeof index);
    commit(netlink, "the route");
}

void set_up_network(void)
{
    write_file("/proc/sys/net/ipv6/conf/default/addr_gen_mode", "1");
    write_file("/proc/sys/net/ipv6/conf/default/accept_ra", "0");
    write_file("/proc/sys/net/ipv6/conf/" CARD "/addr_gen_mode", "1");
    write_file("/proc/sys/net/ipv6/conf/" CARD "/accept_ra", "0");
    write_file("/proc/sys/net/ipv4/ip_unprivileged_port_start", "0");
    uint8_t mac[6];
    errno = EINVAL;
    if (sscanf(required("mac"), "%hhx:%hhx:%hhx:%hhx:%hhx:%hhx", mac, mac + 1, mac + 2, mac + 3, mac + 4, mac + 5) != 6)
        die("mac");
    int netlink = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_ROUTE);
    int index = (int)if_nametoindex(CARD);
    if (netlink < 0 || !index)
        die(CARD);
    rename_to(netlink, index, required("interface"));
    bring_up(netlink, 1);
    bring_up(netlink, index);
    static const char *const names[] = {"ip4", "ip6"};
    for (int i = 0; i < 2; i++) {
        const char *value = option(names[i]);
        if (value)
            add_end(netlink, index, value, mac);
    }
    close(netlink);
    if (sethostname(required("hostname"), strlen(required("hostname"))) < 0)
        die("hostname");
}

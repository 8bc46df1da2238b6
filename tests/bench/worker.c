// A worker that costs next to nothing: OpenAI's chat and Triton's generate, from one epoll loop.
//
//   worker TOKENS SECONDS      prints its port, and ends by itself after so many seconds
//
//   POST …/chat/completions    a whole answer, or a stream where the body has "stream": true
//   POST …/generate            a whole answer        POST …/generate_stream    a stream
//   GET  /_pace/MICROSECONDS   one token of each stream every so often; 0: all of it at once
//   GET  /_told                {"requests": …, "streams": …, "connections": …}
//   GET  anything else         200, as a health check wants it
//
// Each token is " @", its number in the stream (3 digits), and the time (14 digits, microseconds of
// the monotonic clock), so that who reads it knows which one it is and how long it was on its way.
// A whole answer holds token 0 alone.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 16384, INPUT = 2 << 20, EVENTS = 512, IDLE = -1 };
enum dialect { CHAT, TEXT, GENERATE };

struct connection {
    int fd, place, token, doomed;    // place: in `active`, or IDLE
    enum dialect dialect;
    long due;
    char *in, *out;
    long in_size, in_room, out_from, out_size, out_room;
};

static struct connection *connections[MOST];
static struct connection *active[MOST];    // those that stream
static int streaming, poller, tokens;
static long pace, requests, streams, opened;
static char filler[521];

static long now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000L + t.tv_nsec / 1000;
}

static void put(struct connection *c, const char *data, long size) {
    if (c->out_size + size > c->out_room) {
        c->out_room = (c->out_size + size) * 2;
        c->out = realloc(c->out, c->out_room);
    }
    memcpy(c->out + c->out_size, data, size);
    c->out_size += size;
}

static void watch(struct connection *c, unsigned events) {
    struct epoll_event event = {events, {.fd = c->fd}};
    epoll_ctl(poller, EPOLL_CTL_MOD, c->fd, &event);
}

static int flush(struct connection *c) {    // 0: the other side has left
    while (c->out_from < c->out_size) {
        long sent = send(c->fd, c->out + c->out_from, c->out_size - c->out_from, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0) {
            if (errno != EAGAIN) return 0;
            watch(c, EPOLLIN | EPOLLOUT);
            return 1;
        }
        c->out_from += sent;
    }
    c->out_from = c->out_size = 0;
    return 1;
}

static void stop_streaming(struct connection *c) {
    active[c->place] = active[--streaming];
    active[c->place]->place = c->place;
    c->place = IDLE;
}

static void discard(struct connection *c) {
    if (c->place != IDLE) stop_streaming(c);
    close(c->fd);
    connections[c->fd] = NULL;
    free(c->in);
    free(c->out);
    free(c);
}

// --- answers -------------------------------------------------------------------------------------

#define TEXT_CHUNK "{\"id\":\"cmpl-0123456789abcdef0123456789abcdef\",\"object\":\"text_completion\"," \
                   "\"created\":1763690000,\"model\":\"mock\",\"choices\":"
#define CHUNK "{\"id\":\"chatcmpl-0123456789abcdef0123456789abcdef\",\"object\":\"chat.completion.chunk\"," \
              "\"created\":1763690000,\"model\":\"mock\",\"choices\":"

static void whole(struct connection *c, const char *body) {
    char head[256];
    int size = sprintf(head, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n\r\n", strlen(body));
    put(c, head, size);
    put(c, body, strlen(body));
}

static void answer(struct connection *c, enum dialect dialect) {
    char body[2048];
    if (dialect == CHAT)
        sprintf(body, "{\"id\":\"chatcmpl-0123456789abcdef0123456789abcdef\",\"object\":\"chat.completion\",\"created\":1763690000,"
            "\"model\":\"mock\",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"%s @000%014ld\"},"
            "\"logprobs\":null,\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":120,\"completion_tokens\":110,"
            "\"total_tokens\":230}}", filler, now());
    else if (dialect == TEXT)
        sprintf(body, "{\"id\":\"cmpl-0123456789abcdef0123456789abcdef\",\"object\":\"text_completion\",\"created\":1763690000,"
            "\"model\":\"mock\",\"choices\":[{\"index\":0,\"text\":\"%s @000%014ld\","
            "\"logprobs\":null,\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":120,\"completion_tokens\":110,"
            "\"total_tokens\":230}}", filler, now());
    else
        sprintf(body, "{\"model_name\":\"mock\",\"model_version\":\"1\",\"text_output\":\"%s @000%014ld\"}", filler, now());
    whole(c, body);
}

static void event(struct connection *c, const char *data) {
    char text[1024], size[32];
    int length = sprintf(text, "data: %s\n\n", data);
    put(c, size, sprintf(size, "%x\r\n", length));
    put(c, text, length);
    put(c, "\r\n", 2);
}

static void token(struct connection *c) {    // the next one, and after the last the stream's end
    char data[768], text[32];
    sprintf(text, " @%03d%014ld", c->token, now());
    if (c->dialect == GENERATE)
        sprintf(data, "{\"model_name\":\"mock\",\"model_version\":\"1\",\"text_output\":\"%s\"}", text);
    else if (c->dialect == TEXT)
        sprintf(data, TEXT_CHUNK "[{\"index\":0,\"text\":\"%s\",\"logprobs\":null,\"finish_reason\":null}]}", text);
    else
        sprintf(data, CHUNK "[{\"index\":0,\"delta\":{%s\"content\":\"%s\"},\"logprobs\":null,\"finish_reason\":null}]}",
            c->token ? "" : "\"role\":\"assistant\",", text);
    event(c, data);
    if (++c->token < tokens) return;
    if (c->dialect != GENERATE) {
        event(c, c->dialect == TEXT ? TEXT_CHUNK "[{\"index\":0,\"text\":\"\",\"logprobs\":null,\"finish_reason\":\"stop\"}]}"
                                    : CHUNK "[{\"index\":0,\"delta\":{},\"logprobs\":null,\"finish_reason\":\"stop\"}]}");
        sprintf(data, "%s[],\"usage\":{\"prompt_tokens\":120,\"completion_tokens\":%d,\"total_tokens\":%d}}",
            c->dialect == TEXT ? TEXT_CHUNK : CHUNK, tokens, tokens + 120);
        event(c, data);
        event(c, "[DONE]");
    }
    put(c, "0\r\n\r\n", 5);
    stop_streaming(c);
}

static void stream(struct connection *c, enum dialect dialect) {
    static const char head[] = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
                               "Cache-Control: no-cache\r\nTransfer-Encoding: chunked\r\n\r\n";
    put(c, head, sizeof head - 1);
    streams++;
    c->dialect = dialect;
    c->token = 0;
    c->place = streaming;
    active[streaming++] = c;
    if (pace == 0)
        while (c->place != IDLE) token(c);
    else
        c->due = now() + pace / 2 + rand() % pace;    // so that streams do not tick together
}

// --- requests ------------------------------------------------------------------------------------

static void told(struct connection *c) {
    char body[128];
    sprintf(body, "{\"requests\":%ld,\"streams\":%ld,\"connections\":%ld}", requests, streams, opened);
    whole(c, body);
}

static int wants_stream(const char *body, long size) {
    const char *found = memmem(body, size, "\"stream\"", 8);
    if (!found) return 0;
    for (found += 8; *found == ':' || *found == ' ';) found++;
    return *found == 't';
}

static void serve(struct connection *c, char *line, char *body, long size) {
    char *end = memchr(line, '\r', body - line);
    long length = end - line;
    if (!strncmp(line, "GET /_pace/", 11)) {
        pace = atol(line + 11);
        whole(c, "{}");
    } else if (!strncmp(line, "GET /_told", 10)) {
        told(c);
    } else if (!strncmp(line, "GET ", 4)) {
        whole(c, "{\"object\":\"list\",\"data\":[{\"id\":\"mock\",\"object\":\"model\",\"created\":1,\"owned_by\":\"mock\"}]}");
    } else {
        requests++;
        if (memmem(line, length, "/generate_stream", 16)) stream(c, GENERATE);
        else if (memmem(line, length, "/generate", 9)) answer(c, GENERATE);
        else {
            enum dialect asked = memmem(line, length, "/chat/", 6) ? CHAT : TEXT;
            if (wants_stream(body, size)) stream(c, asked);
            else answer(c, asked);
        }
    }
}

// The size of the body behind a head; -1 where a body in chunks is not all there.
static long body_size(char *head, long head_size, long there) {
    char kept = head[head_size], *found;
    head[head_size] = 0;
    long size = 0;
    if ((found = strcasestr(head, "\r\ncontent-length:"))) size = atol(found + 17);
    int chunked = strcasestr(head, "\r\ntransfer-encoding: chunked") != NULL;
    head[head_size] = kept;
    if (!chunked) return size;
    found = memmem(head + head_size - 2, there + 2, "\r\n0\r\n\r\n", 7);
    return found ? found + 7 - (head + head_size) : -1;
}

static void take(struct connection *c) {    // every request that is all there
    long from = 0;
    while (c->place == IDLE) {
        char *head = c->in + from, *end = memmem(head, c->in_size - from, "\r\n\r\n", 4);
        if (!end) break;
        long head_size = end + 4 - head, there = c->in_size - from - head_size;
        long size = body_size(head, head_size, there);
        if (size < 0 || size > there) break;
        c->doomed = strncasecmp(head, "GET ", 4) && memmem(head, head_size, "onnection: close", 16);
        serve(c, head, head + head_size, size);
        from += head_size + size;
    }
    memmove(c->in, c->in + from, c->in_size - from);
    c->in_size -= from;
}

static int readable(struct connection *c) {    // 0: it is over
    if (c->in_size + 65536 > c->in_room) {
        c->in_room = c->in_size + 131072;
        if (c->in_room > INPUT) return 0;
        c->in = realloc(c->in, c->in_room + 1);
    }
    long got = recv(c->fd, c->in + c->in_size, c->in_room - c->in_size, MSG_DONTWAIT);
    if (got <= 0) return 0;
    c->in_size += got;
    c->in[c->in_size] = 0;
    take(c);
    return flush(c) && !(c->doomed && c->place == IDLE && !c->out_size);
}

static void welcome(int listener) {
    int fd, one = 1;
    while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
        if (fd >= MOST) {
            close(fd);
            continue;
        }
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        struct connection *c = calloc(1, sizeof *c);
        c->fd = fd;
        c->place = IDLE;
        connections[fd] = c;
        opened++;
        struct epoll_event event = {EPOLLIN, {.fd = fd}};
        epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event);
    }
}

static void tick(void) {    // the tokens that are due
    long at = now();
    for (int i = streaming - 1; i >= 0; i--) {    // from behind: one that ends is replaced by the last
        struct connection *c = active[i];
        if (c->due > at) continue;
        c->due += pace;
        token(c);
        if (c->place == IDLE) take(c);
        if (!flush(c)) discard(c);
    }
}

static struct timespec until_next(void) {
    long at = now(), next = at + 1000000;
    for (int i = 0; i < streaming; i++)
        if (active[i]->due < next) next = active[i]->due;
    long left = next > at ? next - at : 0;
    return (struct timespec){left / 1000000, left % 1000000 * 1000};
}

static int listening(void) {
    int one = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t size = sizeof address;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(fd, (void *)&address, size) || listen(fd, 4096)) exit(1);
    getsockname(fd, (void *)&address, &size);
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    return fd;
}

int main(int count, char **words) {
    if (count != 3) return 2;
    tokens = atoi(words[1]);
    alarm(atoi(words[2]));
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    while (strlen(filler) < 512) strcat(filler, "brown fox");
    poller = epoll_create1(0);
    int listener = listening();
    struct epoll_event first = {EPOLLIN, {.fd = listener}}, events[EVENTS];
    epoll_ctl(poller, EPOLL_CTL_ADD, listener, &first);
    for (;;) {
        struct timespec left = until_next();
        int found = epoll_pwait2(poller, events, EVENTS, streaming ? &left : NULL, NULL);
        for (int i = 0; i < found; i++) {
            int fd = events[i].data.fd;
            struct connection *c = connections[fd];
            if (fd == listener) welcome(listener);
            else if (!c) continue;
            else if (events[i].events & EPOLLOUT) {
                if (flush(c) && !c->out_size) watch(c, EPOLLIN);
            } else if (!readable(c)) discard(c);
        }
        tick();
    }
}

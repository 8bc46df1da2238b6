// Many clients of low cost, from one epoll loop.
//
//   load PORT REQUESTS_FILE NAME=VALUE…      prints one line of JSON
//
// The file holds whole HTTP requests, each behind its length and a line feed. They are sent in their
// order by whichever client is free, and from the first one again when all are sent.
//
//   clients=32     how many connections                 count=1000   how many requests at most
//   seconds=2      how long requests are begun          grace=10     how long the last may then take
//   tokens=100     how many a response must have         end=TEXT     what must come behind the last
//   tls=0          1: over TLS, without a check of the certificate
//   rate=0         requests a second, whoever waits (an open loop, in which a time begins when its
//                  request was due); 0: each client asks anew when it is answered (a closed loop)
//
// An answer is right when its status is 200, its tokens are 0, 1, 2 … up to exactly as many as
// wanted, and it came to its end. Whatever else comes is an error, and `last_error` names the last one.
// Times are in microseconds. See worker.c for what a token is.
#define _GNU_SOURCE
#ifdef WITH_TLS
#include <openssl/err.h>
#include <openssl/ssl.h>
#endif
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { HEAD = 16384, TAIL = 32, DIGITS = 17, EVENTS = 256, MOST = 4000000, RECORD = 16384 };
enum state { HEADING, SIZE, DATA, DATA_END, LAST, PLAIN };
enum outcome { ON, COMPLETE, BROKEN };

struct client {
    void *tls;
    int handshaking, blocked, fd, connecting, busy, status, closes, tokens, wrong, digits, tail_size;
    long request;
    enum state state;
    long sent, head_size, left, begun, first, last, value;
    char head[HEAD], tail[TAIL];
};

struct measured {
    const char *name;
    float *values;
    long size;
};

static struct measured latency = {.name = "latency"}, first_token = {.name = "first_token"};
static struct measured gap = {.name = "gap"}, token_delay = {.name = "token"};
static long begun, completed, errors, all_tokens, count = 1000, opens, until;
static int port, poller, wanted = 1, clients = 1, tls = 0;
static double seconds = 2, grace = 10, rate = 0;
static const char *end = "", *why = "";
static struct { const char *data; long size; } *requests;
static long request_count, origin;

static long now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000L + t.tv_nsec / 1000;
}

static void measure(struct measured *one, float value) {
    if (one->size < MOST) one->values[one->size++] = value;
}

static int rising(const void *a, const void *b) {
    float x = *(float *)a, y = *(float *)b;
    return (x > y) - (x < y);
}

static void print(struct measured *one) {
    long n = one->size;
    float *v = one->values;
    if (!n) {
        printf(",\"%s\":null", one->name);
        return;
    }
    qsort(v, n, sizeof *v, rising);
    printf(",\"%s\":{\"p50\":%.1f,\"p90\":%.1f,\"p99\":%.1f,\"max\":%.1f}", one->name,
        v[n / 2], v[(long)(n * .9)], v[(long)(n * .99)], v[n - 1]);
}

// --- TLS -----------------------------------------------------------------------------------------

#ifdef WITH_TLS

static SSL_CTX *tls_context;

static int is_pending(struct client *c, int result) {    // whether to try again later
    int error = SSL_get_error(c->tls, result);
    ERR_clear_error();
    return error == SSL_ERROR_WANT_READ || error == SSL_ERROR_WANT_WRITE;
}

static void start_tls(struct client *c) {
    if (!tls_context) tls_context = SSL_CTX_new(TLS_client_method());
    if (c->tls) SSL_free(c->tls);
    c->tls = SSL_new(tls_context);
    SSL_set_mode(c->tls, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
    SSL_set_fd(c->tls, c->fd);
    c->handshaking = 1;
}

static int handshake(struct client *c) {    // 1: it is complete; 0: more is to come; -1: it failed
    int result = SSL_connect(c->tls);
    if (result != 1) return is_pending(c, result) ? 0 : -1;
    c->handshaking = 0;
    return 1;
}

static long write_some(struct client *c, const char *data, long size) {
    if (!tls) return send(c->fd, data, size, MSG_NOSIGNAL);
    int written = SSL_write(c->tls, data, size);
    if (written > 0) return written;
    errno = is_pending(c, written) ? EAGAIN : EPIPE;
    return -1;
}

static long read_some(struct client *c, char *data, long size) {
    if (!tls) return recv(c->fd, data, size, 0);
    long total = 0;
    while (size - total >= RECORD) {    // whole records: the rest of one in OpenSSL's buffer wakes nobody
        int got = SSL_read(c->tls, data + total, size - total);
        if (got > 0) {
            total += got;
            continue;
        }
        if (total) break;
        if (!is_pending(c, got)) return 0;
        errno = EAGAIN;
        return -1;
    }
    return total;
}

#else

static void start_tls(struct client *c) { (void)c; exit(2); }
static int handshake(struct client *c) { (void)c; return -1; }
static long write_some(struct client *c, const char *data, long size) { return send(c->fd, data, size, MSG_NOSIGNAL); }
static long read_some(struct client *c, char *data, long size) { return recv(c->fd, data, size, 0); }

#endif

// --- requests ------------------------------------------------------------------------------------

static void open_connection(struct client *c) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr = {htonl(INADDR_LOOPBACK)}};
    struct epoll_event event = {EPOLLIN | EPOLLOUT, {.ptr = c}};
    int one = 1;
    c->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    connect(c->fd, (void *)&address, sizeof address);
    epoll_ctl(poller, EPOLL_CTL_ADD, c->fd, &event);
    c->connecting = 1;
    c->handshaking = c->blocked = 0;
    opens++;
}

static long due(void) {    // when the next request is, with a rate
    return origin + (long)(begun * 1e6 / rate);
}

static int may_send(void) {
    return begun < count && now() < until && (!rate || due() <= now());
}

static void watch(struct client *c, unsigned events) {
    struct epoll_event event = {events, {.ptr = c}};
    epoll_ctl(poller, EPOLL_CTL_MOD, c->fd, &event);
}

static void send_request(struct client *c) {    // what the socket does not take now is sent when it can
    const char *data = requests[c->request].data;
    long size = requests[c->request].size;
    while (c->sent < size) {
        long more = write_some(c, data + c->sent, size - c->sent);
        if (more <= 0) {
            if (errno != EAGAIN) return;    // reading tells why
            c->blocked = 1;
            watch(c, EPOLLIN | EPOLLOUT);
            return;
        }
        c->sent += more;
    }
    if (c->blocked) watch(c, EPOLLIN);
    c->blocked = 0;
}

static void start_request(struct client *c) {
    c->begun = rate ? due() : now();
    c->request = begun++ % request_count;
    c->busy = 1;
    c->state = HEADING;
    c->sent = c->head_size = c->tokens = c->wrong = c->tail_size = 0;
    c->digits = -1;
    c->first = c->last = 0;
    if (!c->connecting && !c->handshaking) send_request(c);
}

static void fail(const char *what) {
    errors++;
    why = what;
}

static void finish_request(struct client *c, enum outcome how) {
    long at = now();
    c->busy = 0;
    completed++;
    if (how == BROKEN) fail("the answer broke off");
    else if (c->status != 200) fail("the status is not 200");
    else if (c->wrong) fail("a token is lost, doubled or out of its place");
    else if (c->tokens != wanted) fail("there are too few tokens");
    else if (*end && !memmem(c->tail, c->tail_size, end, strlen(end))) fail("it has no end");
    else {
        measure(&latency, at - c->begun);
        if (wanted > 1) measure(&first_token, c->first - c->begun);
    }
}

// --- responses -----------------------------------------------------------------------------------

static void count_token(struct client *c, long at) {
    long number = c->value / 100000000000000, sent = c->value % 100000000000000;
    if (number != c->tokens || number >= wanted) c->wrong = 1;
    c->tokens++;
    all_tokens++;
    measure(&token_delay, at - sent);
    if (!c->first) c->first = at;
    else if (c->last != at) measure(&gap, at - c->last);
    c->last = at;
}

static void find_tokens(struct client *c, const char *data, long size, long at) {
    for (long i = 0; i < size; i++) {
        char sign = data[i];
        if (c->digits >= 0 && sign >= '0' && sign <= '9') {
            c->value = c->value * 10 + sign - '0';
            if (++c->digits < DIGITS) continue;
            count_token(c, at);
            c->digits = -1;
        } else {
            c->digits = sign == '@' ? 0 : -1;
            c->value = 0;
        }
    }
    long kept = size < TAIL ? size : TAIL, old = TAIL - kept < c->tail_size ? TAIL - kept : c->tail_size;
    memmove(c->tail, c->tail + c->tail_size - old, old);
    memcpy(c->tail + old, data + size - kept, kept);
    c->tail_size = old + kept;
}

static enum outcome parse_head(struct client *c) {    // the head is there
    c->head[c->head_size] = 0;
    c->status = atoi(c->head + 9);
    c->closes = strcasestr(c->head, "\r\nconnection: close") != NULL;
    c->head_size = 0;
    if (c->status == 100) return ON;
    const char *length = strcasestr(c->head, "\r\ncontent-length:");
    c->left = length ? atol(length + 17) : -1;
    c->state = strcasestr(c->head, "\r\ntransfer-encoding: chunked") ? SIZE : PLAIN;
    if (c->state == SIZE) c->left = 0;
    return c->state == PLAIN && c->left == 0 ? COMPLETE : ON;
}

static enum outcome parse_body(struct client *c, const char *data, long *from, long size, long at) {
    long part = size - *from;
    if (c->left >= 0 && part > c->left) part = c->left;
    find_tokens(c, data + *from, part, at);
    *from += part;
    if (c->left < 0) return ON;
    c->left -= part;
    if (c->left) return ON;
    if (c->state == PLAIN) return COMPLETE;
    c->state = DATA_END;
    return ON;
}

static void parse_size_digit(struct client *c, char sign) {    // a letter of a chunk's size
    if (sign == '\n') c->state = c->left ? DATA : LAST;
    else if (sign != '\r') c->left = c->left * 16 + (sign <= '9' ? sign - '0' : (sign | 32) - 'a' + 10);
}

static enum outcome parse(struct client *c, const char *data, long size, long at) {
    enum outcome how = ON;
    for (long i = 0; i < size && how == ON;) {
        if (c->state == DATA || c->state == PLAIN) {
            how = parse_body(c, data, &i, size, at);
            continue;
        }
        char sign = data[i++];
        if (c->state == SIZE) parse_size_digit(c, sign);
        else if (c->state == LAST) how = sign == '\n' ? COMPLETE : ON;
        else if (c->state == DATA_END && sign == '\n') c->state = SIZE;
        else if (c->state == HEADING) {
            c->head[c->head_size++] = sign;
            if (c->head_size == HEAD - 1) return BROKEN;
            if (c->head_size >= 4 && !memcmp(c->head + c->head_size - 4, "\r\n\r\n", 4)) how = parse_head(c);
        }
    }
    return how;
}

// --- the loop ------------------------------------------------------------------------------------

static void reconnect(struct client *c) {
    close(c->fd);
    open_connection(c);
}

static void finish_handshake(struct client *c) {
    int how = handshake(c);
    if (how > 0 && c->busy) send_request(c);
    if (how < 0) {
        if (c->busy) finish_request(c, BROKEN);
        close(c->fd);
    }
}

static void connected(struct client *c) {
    watch(c, EPOLLIN);
    c->connecting = 0;
    if (tls) {
        start_tls(c);
        finish_handshake(c);
    } else if (c->busy) send_request(c);
}

static void readable(struct client *c) {
    static char data[262144];
    if (c->handshaking) {
        finish_handshake(c);
        return;
    }
    long size = read_some(c, data, sizeof data), at = now();
    if (size < 0 && errno == EAGAIN) return;
    if (size <= 0) {
        int ended = size == 0 && c->state == PLAIN && c->left < 0;    // its length was not told
        if (c->busy) finish_request(c, ended ? COMPLETE : BROKEN);
        if (may_send()) reconnect(c);
        else close(c->fd);
    } else if (c->busy) {
        enum outcome how = parse(c, data, size, at);
        if (how == ON) return;
        finish_request(c, how);
        if (how == BROKEN || c->closes) reconnect(c);
    }
    if (!rate && !c->busy && may_send()) start_request(c);
}

static void send_when_due(struct client *all) {
    for (int i = 0; i < clients && may_send(); i++)
        if (!all[i].busy) start_request(&all[i]);
}

static void run(struct client *all) {
    struct epoll_event events[EVENTS];
    long last = until + (long)(grace * 1e6);
    for (int i = 0; i < clients; i++) {
        open_connection(&all[i]);
        if (!rate && may_send()) start_request(&all[i]);
    }
    while (completed < begun || (begun < count && now() < until)) {
        if (now() > last) {
            errors += begun - completed;
            why = "time is up";
            return;
        }
        if (rate) send_when_due(all);
        struct timespec nap = {0, rate ? 200000 : 100000000};
        int found = epoll_pwait2(poller, events, EVENTS, &nap, NULL);
        for (int i = 0; i < found; i++) {
            struct client *c = events[i].data.ptr;
            if (c->connecting && events[i].events & EPOLLOUT) connected(c);
            else if (c->blocked && events[i].events & EPOLLOUT) send_request(c);
            if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) readable(c);
        }
    }
}

// --- the command ---------------------------------------------------------------------------------

static void set_option(char *word) {
    char *value = strchr(word, '=');
    if (!value) exit(2);
    *value++ = 0;
    if (!strcmp(word, "clients")) clients = atoi(value);
    else if (!strcmp(word, "count")) count = atol(value);
    else if (!strcmp(word, "seconds")) seconds = atof(value);
    else if (!strcmp(word, "grace")) grace = atof(value);
    else if (!strcmp(word, "tokens")) wanted = atoi(value);
    else if (!strcmp(word, "end")) end = value;
    else if (!strcmp(word, "rate")) rate = atof(value);
    else if (!strcmp(word, "tls")) tls = atoi(value);
    else exit(2);
}

static void read_requests(const char *name) {
    FILE *file = fopen(name, "rb");
    if (!file) exit(2);
    fseek(file, 0, SEEK_END);
    long size = ftell(file);
    rewind(file);
    char *all = malloc(size + 1), *at = all;
    if (fread(all, 1, size, file) != (size_t)size) exit(2);
    all[size] = 0;
    fclose(file);
    while (at < all + size) {
        char *data;
        long length = strtol(at, &data, 10);
        at = data + 1 + length;
        if (*data != '\n' || length <= 0 || at > all + size) exit(2);
        if (request_count % 1024 == 0) requests = realloc(requests, (request_count + 1024) * sizeof *requests);
        requests[request_count].data = data + 1;
        requests[request_count++].size = length;
    }
    if (!request_count) exit(2);
}

int main(int words, char **word) {
    if (words < 3) return 2;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    port = atoi(word[1]);
    for (int i = 3; i < words; i++) set_option(word[i]);
    read_requests(word[2]);
    alarm((int)(seconds + grace) + 30);
    struct measured *all[] = {&latency, &first_token, &gap, &token_delay};
    for (int i = 0; i < 4; i++) all[i]->values = malloc(MOST * sizeof(float));
    poller = epoll_create1(0);
    origin = now();
    until = origin + (long)(seconds * 1e6);
    run(calloc(clients, sizeof(struct client)));
    printf("{\"completed\":%ld,\"errors\":%ld,\"last_error\":\"%s\",\"tokens\":%ld,\"connections\":%ld,\"seconds\":%.4f",
        completed, errors, why, all_tokens, opens, (now() - origin) / 1e6);
    for (int i = 0; i < 4; i++) print(all[i]);
    printf("}\n");
}

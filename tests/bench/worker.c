// A worker of low cost: OpenAI's chat and embeddings and Triton's generate, from one epoll loop.
//
//   worker TOKENS SECONDS RESPONSES      prints its port, and ends by itself after so many seconds
//
//   POST …/chat/completions    a response, or a stream where the body has "stream": true
//   POST …/generate            a response              POST …/generate_stream    a stream
//   POST …/embeddings          a vector for each input, in base64 where the body asks for that
//   GET  /_pace/MICROSECONDS   one token of each stream every so often; 0: all of it at once
//   GET  /_stats               {"requests": …, "streams": …, "connections": …, "open_streams": …}
//   GET  anything else         200, as a health check wants it
//
// Each token is " @", its number in the stream (3 digits), and the time (14 digits, microseconds of
// the monotonic clock), so that who reads it knows which one it is and how long it was on its way.
// A unary response has token 0 alone. Around the tokens stand the templates of the file RESPONSES
// (responses.py), chosen by the request's model.
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

enum { MOST = 16384, INPUT = 32 << 20, EVENTS = 512, IDLE = -1, TEMPLATES = 128, WORDS = 64, MODEL = 64, VECTORS = 16, DIMENSIONS = 384 };
enum slot { HEAD, UNARY, OPEN, FIRST, TOKEN, LAST, USAGE, SLOTS };
enum placeholder { WORD_TOKEN = 14, ASCII_TOKEN, BARE_TOKEN, LONG_TEXT, ASCII_TEXT, ID, CREATED, STARTED,
    MODEL_NAME, PADDING, FOUR_DIGITS, TOKEN_COUNT, PROMPT_COUNT, TOTAL_COUNT, DURATION, DATE, LINE_END };

struct connection {
    int fd, place, token, closes, wants_usage, generates;    // place: in `active`, or IDLE
    long due, started, prompt_tokens;
    char *in, *out;
    long in_size, in_room, out_from, out_size, out_room;
    char model[MODEL], id[33];
    const char *slots[SLOTS];
};

struct template {
    const char *style, *name, *text;
};

static struct connection *connections[MOST];
static struct connection *active[MOST];    // those that stream
static int streaming, poller, tokens;
static long pace, requests, streams, opened;
static struct template templates[TEMPLATES];
static const char *words[2][WORDS];    // as they are in JSON, and with its escapes alone
static int template_count, word_count;
static unsigned long state = 88172645463325252;
static char *vectors[2][VECTORS];    // as numbers, and as base64 in quotes

static long now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000L + t.tv_nsec / 1000;
}

static void append(struct connection *c, const char *data, long size) {
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

// --- templates -----------------------------------------------------------------------------------

static unsigned long draw(unsigned long below) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state % below;
}

static void read_templates(const char *name) {
    FILE *file = fopen(name, "rb");
    char *line = NULL;
    size_t room = 0;
    if (!file) exit(2);
    for (long size; (size = getline(&line, &room, file)) > 0; line = NULL, room = 0) {
        line[size - 1] = 0;
        char *second = strchr(line, '\t'), *third = second ? strchr(second + 1, '\t') : NULL;
        if (!third) exit(2);
        *second++ = *third++ = 0;
        if (!strcmp(line, "word") && word_count < WORDS) {
            words[0][word_count] = second;
            words[1][word_count++] = third;
        } else if (template_count < TEMPLATES)
            templates[template_count++] = (struct template){line, second, third};
        else exit(2);
    }
    fclose(file);
}

static const char *find_template(const char *style, const char *name) {
    for (int i = 0; i < template_count; i++)
        if (!strcmp(templates[i].style, style) && !strcmp(templates[i].name, name)) return templates[i].text;
    return NULL;
}

static int has_style(const char *style) {
    return find_template(style, "chat.unary") != NULL;
}

// A response's templates: those of the variant where the style has them.
static void choose_templates(struct connection *c, const char *protocol, const char *variant) {
    static const char *names[] = {"head", "unary", "open", "first", "token", "last", "usage"};
    char style[MODEL], name[MODEL];
    strcpy(style, c->model);
    char *dash = strrchr(style, '-');
    if (dash) *dash = 0;
    if (!dash || !has_style(style) || !strcmp(protocol, "text")) strcpy(style, "mock");
    for (int slot = HEAD; slot < SLOTS; slot++) {
        if (slot == HEAD) strcpy(name, "head");
        else sprintf(name, "%s.%s%s", protocol, names[slot], variant);
        c->slots[slot] = find_template(style, name);
        if (c->slots[slot] || slot == HEAD) continue;
        sprintf(name, "%s.%s", protocol, names[slot]);
        c->slots[slot] = find_template(style, name);
    }
}

static char *write_words(char *to, int ascii, int characters) {
    for (char *from = to; to - from < characters;) to = stpcpy(to, words[ascii][draw(word_count)]);
    return to;
}

static char *fill_in(struct connection *c, char *to, enum placeholder what) {
    time_t second = time(NULL);
    switch (what) {
        case WORD_TOKEN: case ASCII_TOKEN: to = write_words(to, what == ASCII_TOKEN, 1); break;
        case LONG_TEXT: case ASCII_TEXT: to = write_words(to, what == ASCII_TEXT, 50 + draw(1950)); break;
        case BARE_TOKEN: break;
        case ID: return stpcpy(to, c->id);
        case CREATED: return to + sprintf(to, "%ld", (long)second);
        case STARTED: return to + sprintf(to, "%ld", c->started);
        case MODEL_NAME: return stpcpy(to, c->model);
        case PADDING:
            for (int left = 1 + draw(16); left; left--) *to++ = 'A' + draw(26);
            return to;
        case FOUR_DIGITS: return to + sprintf(to, "%04lu", 1000 + draw(9000));
        case TOKEN_COUNT: return to + sprintf(to, "%d", tokens);
        case PROMPT_COUNT: return to + sprintf(to, "%ld", c->prompt_tokens);
        case TOTAL_COUNT: return to + sprintf(to, "%ld", c->prompt_tokens + tokens);
        case DURATION: return to + sprintf(to, "%lu.%03lu", 1 + draw(900), draw(1000));
        case DATE: return to + strftime(to, 64, "%a, %d %b %Y %H:%M:%S GMT", gmtime(&second));
        case LINE_END: return stpcpy(to, "\r\n");
    }
    return to + sprintf(to, " @%03d%014ld", c->token, now());
}

static long fill(struct connection *c, const char *template, char *to) {
    char *from = to;
    for (const char *sign = template; sign && *sign; sign++) {
        if (*sign >= WORD_TOKEN && *sign <= LINE_END) to = fill_in(c, to, *sign);
        else *to++ = *sign;
    }
    *to = 0;
    return to - from;
}

// --- vectors -------------------------------------------------------------------------------------

static char *encode_base64(const unsigned char *data, long size) {
    static const char letters[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    char *text = malloc(size / 3 * 4 + 3), *to = text;    // the size is a multiple of three
    *to++ = '"';
    for (long i = 0; i < size; i += 3) {
        unsigned three = data[i] << 16 | data[i + 1] << 8 | data[i + 2];
        for (int shift = 18; shift >= 0; shift -= 6) *to++ = letters[three >> shift & 63];
    }
    strcpy(to, "\"");
    return text;
}

static void make_vectors(void) {
    for (int i = 0; i < VECTORS; i++) {
        float values[DIMENSIONS];
        char *text = malloc(DIMENSIONS * 16), *to = text;
        for (int k = 0; k < DIMENSIONS; k++) {
            values[k] = (float)((long)draw(200001) - 100000) / 1000000;
            to += sprintf(to, "%c%.9g", k ? ',' : '[', values[k]);
        }
        strcpy(to, "]");
        vectors[0][i] = text;
        vectors[1][i] = encode_base64((void *)values, sizeof values);
    }
}

// How many strings a JSON array of strings has; one for a single string.
static long count_strings(const char *value) {
    long count = 0;
    int quoted = 0, array = *value == '[';
    for (; *value && (quoted || *value != ']'); value++) {
        if (quoted && *value == '\\') value++;
        else if (*value == '"') {
            count += !quoted;
            quoted = !quoted;
            if (!quoted && !array) break;
        }
    }
    return count;
}

// --- answers -------------------------------------------------------------------------------------

static char filled[1 << 17];

static void write_response(struct connection *c, const char *extra, const char *body, long length) {
    char head[1024];
    int size = sprintf(head, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n%sContent-Length: %ld\r\n\r\n", extra, length);
    append(c, head, size);
    append(c, body, length);
}

static void write_unary(struct connection *c) {
    char extra[512];
    fill(c, c->slots[HEAD], extra);
    write_response(c, extra, filled, fill(c, c->slots[UNARY], filled));
}

static void write_event(struct connection *c, const char *template) {
    char size[32];
    long length = fill(c, template, filled);
    append(c, size, sprintf(size, "%lx\r\n", length + 8));
    append(c, "data: ", 6);
    append(c, filled, length);
    append(c, "\n\n\r\n", 4);
}

static void write_token(struct connection *c) {    // the next one, and after the last the stream's end
    if (!c->token && c->slots[OPEN]) write_event(c, c->slots[OPEN]);
    write_event(c, !c->token && c->slots[FIRST] ? c->slots[FIRST] : c->slots[TOKEN]);
    if (++c->token < tokens) return;
    if (!c->generates) {
        write_event(c, c->slots[LAST]);
        if (c->wants_usage) write_event(c, c->slots[USAGE]);
        write_event(c, "[DONE]");
    }
    append(c, "0\r\n\r\n", 5);
    stop_streaming(c);
}

static void stream(struct connection *c) {
    static const char head[] = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
                               "Cache-Control: no-cache\r\n";
    char extra[512];
    append(c, head, sizeof head - 1);
    append(c, extra, fill(c, c->slots[HEAD], extra));
    append(c, "Transfer-Encoding: chunked\r\n\r\n", 30);
    streams++;
    c->place = streaming;
    active[streaming++] = c;
    if (pace == 0)
        while (c->place != IDLE) write_token(c);
    else
        c->due = now() + pace / 2 + rand() % pace;    // so that streams do not tick together
}

// --- requests ------------------------------------------------------------------------------------

static void write_stats(struct connection *c) {
    char body[160];
    write_response(c, "", body, sprintf(body, "{\"requests\":%ld,\"streams\":%ld,\"connections\":%ld,\"open_streams\":%d}",
        requests, streams, opened, streaming));
}

// The value of a member of a JSON body, or NULL; in a string, its quotes would be escaped.
static const char *member(const char *body, long size, const char *quoted_name) {
    const char *found = memmem(body, size, quoted_name, strlen(quoted_name));
    if (!found) return NULL;
    for (found += strlen(quoted_name); *found == ':' || *found == ' ';) found++;
    return found;
}

static int is_true(const char *body, long size, const char *quoted_name) {
    const char *value = member(body, size, quoted_name);
    return value && *value == 't';
}

static void copy_model(struct connection *c, const char *from, char end) {
    int size = 0;
    for (; from && *from && *from != end && size < MODEL - 1; from++) c->model[size++] = *from;
    c->model[size] = 0;
}

// Whether the answer is a call of a tool: the request has tools, and no tool's result yet.
static int calls_tool(const char *body, long size) {
    return member(body, size, "\"tools\"") && !memmem(body, size, "\"tool_call_id\"", 14);
}

static void embed(struct connection *c, const char *body, long size) {
    const char *input = member(body, size, "\"input\""), *format = member(body, size, "\"encoding_format\"");
    long count = input ? count_strings(input) : 0, from;
    int base64 = format && !strncmp(format, "\"base64", 7);
    char head[512], *data = malloc(count * (DIMENSIONS * 16 + 64) + 512), *to = data;
    to += sprintf(to, "{\"id\":\"embd-%s\",\"object\":\"list\",\"created\":%ld,\"model\":\"%s\",\"data\":[", c->id, c->started, c->model);
    for (from = 0; from < count; from++) {
        to += sprintf(to, "%s{\"index\":%ld,\"object\":\"embedding\",\"embedding\":", from ? "," : "", from);
        to = stpcpy(stpcpy(to, vectors[base64][draw(VECTORS)]), "}");
    }
    to += sprintf(to, "],\"usage\":{\"prompt_tokens\":%ld,\"total_tokens\":%ld}}", size / 4, size / 4);
    fill(c, c->slots[HEAD], head);
    write_response(c, head, data, to - data);
    free(data);
}

static void respond(struct connection *c, char *line, long length, const char *body, long size) {
    static const char inference[] = "/v2/models/";
    char *generate = memmem(line, length, "/generate", 9), *path = memmem(line, length, inference, sizeof inference - 1);
    int streamed = generate ? generate[9] == '_' : is_true(body, size, "\"stream\"");
    const char *model = generate ? (path ? path + sizeof inference - 1 : NULL) : member(body, size, "\"model\"");
    copy_model(c, !generate && model ? model + 1 : model, generate ? '/' : '"');
    const char *variant = is_true(body, size, "\"logprobs\"") ? "+logprobs" : "";
    long named = strlen(c->model);
    if (!generate && calls_tool(body, size)) variant = "+tools";
    if (streamed && !*variant && named > 2 && !strcmp(c->model + named - 2, "-4")) variant = "+obfuscation";
    choose_templates(c, generate ? "generate" : memmem(line, length, "/chat/", 6) ? "chat" : "text", variant);
    sprintf(c->id, "%016lx%016lx", draw(-1UL), draw(-1UL));
    c->started = time(NULL);
    c->prompt_tokens = size / 4;
    c->generates = generate != NULL;
    c->wants_usage = is_true(body, size, "\"include_usage\"");
    c->token = 0;
    if (memmem(line, length, "/embeddings", 11)) embed(c, body, size);
    else if (streamed) stream(c);
    else write_unary(c);
}

static void serve(struct connection *c, char *line, char *body, long size) {
    static const char models[] = "{\"object\":\"list\",\"data\":[{\"id\":\"mock\",\"object\":\"model\",\"created\":1,\"owned_by\":\"mock\"}]}";
    char *end = memchr(line, '\r', body - line);
    if (!strncmp(line, "GET /_pace/", 11)) {
        pace = atol(line + 11);
        write_response(c, "", "{}", 2);
    } else if (!strncmp(line, "GET /_stats", 11)) {
        write_stats(c);
    } else if (!strncmp(line, "GET ", 4)) {
        write_response(c, "", models, sizeof models - 1);
    } else {
        requests++;
        respond(c, line, end - line, body, size);
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

static void handle_requests(struct connection *c) {    // every request that is all there
    long from = 0;
    while (c->place == IDLE) {
        char *head = c->in + from, *end = memmem(head, c->in_size - from, "\r\n\r\n", 4);
        if (!end) break;
        long head_size = end + 4 - head, there = c->in_size - from - head_size;
        long size = body_size(head, head_size, there);
        if (size < 0 || size > there) break;
        c->closes = strncasecmp(head, "GET ", 4) && memmem(head, head_size, "onnection: close", 16);
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
    handle_requests(c);
    return flush(c) && !(c->closes && c->place == IDLE && !c->out_size);
}

static void accept_connections(int listener) {
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

static void write_due_tokens(void) {    // the tokens that are due
    long at = now();
    for (int i = streaming - 1; i >= 0; i--) {    // from behind: one that ends is replaced by the last
        struct connection *c = active[i];
        if (c->due > at) continue;
        c->due += pace;
        write_token(c);
        if (c->place == IDLE) handle_requests(c);
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

int main(int count, char **argument) {
    if (count != 4) return 2;
    tokens = atoi(argument[1]);
    alarm(atoi(argument[2]));
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    read_templates(argument[3]);
    make_vectors();
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
            if (fd == listener) accept_connections(listener);
            else if (!c) continue;
            else if (events[i].events & EPOLLOUT) {
                if (flush(c) && !c->out_size) watch(c, EPOLLIN);
            } else if (!readable(c)) discard(c);
        }
        write_due_tokens();
    }
}

/*
 * Halts a daemon at the records of its journal of operations, for the tests that kill processes at a state.
 *
 * Loaded before the C library (LD_PRELOAD). A write to the journal is first told, with its bytes, on the socket that
 * HEGM_TEST_HALT names, and waits for one byte of answer; so does the sync after it. Whoever listens there can thus do
 * something exactly between an effect and its record, or between a record and what it leads to, with the daemon as it
 * is installed. With nobody there, everything goes on.
 *
 * Frames: 'W' or 'S', the number of bytes as 4 in the machine's order, the bytes. One call at a time: the daemon writes
 * its journal under a lock.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

static const char JOURNAL[] = "/operations.journal";
static int told = -1;

static int is_journal(int fd)
{
	char link[64], path[4096];
	snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
	ssize_t length = readlink(link, path, sizeof path);
	ssize_t tail = (ssize_t)sizeof JOURNAL - 1;
	return length >= tail && memcmp(path + length - tail, JOURNAL, (size_t)tail) == 0;
}

static void hang_up(void)
{
	close(told);
	told = -1;
}

static int call(void)
{
	const char *where = getenv("HEGM_TEST_HALT");
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	if (where == NULL || strlen(where) >= sizeof address.sun_path)
		return -1;
	strcpy(address.sun_path, where);
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof address) != 0) {
		close(fd);
		return -1;
	}
	return fd;
}

static int say(const void *data, size_t size)
{
	const char *next = data;
	while (size > 0) {
		ssize_t sent = send(told, next, size, MSG_NOSIGNAL);
		if (sent < 0 && errno == EINTR)
			continue;
		if (sent < 0)
			return -1;
		next += sent;
		size -= (size_t)sent;
	}
	return 0;
}

static void halt(char what, const void *data, size_t size)
{
	char go, head[5] = {what};
	uint32_t count = (uint32_t)size;
	int before = errno;
	if (told < 0 && (told = call()) < 0) {
		errno = before;
		return;
	}
	memcpy(head + 1, &count, sizeof count);
	if (say(head, sizeof head) != 0 || say(data, size) != 0) {
		hang_up();
	} else {
		ssize_t got;
		do
			got = recv(told, &go, 1, 0);
		while (got < 0 && errno == EINTR);
		if (got != 1)
			hang_up();
	}
	errno = before;
}

ssize_t write(int fd, const void *data, size_t size)
{
	static ssize_t (*real)(int, const void *, size_t);
	if (real == NULL)
		real = (ssize_t(*)(int, const void *, size_t))dlsym(RTLD_NEXT, "write");
	if (size > 0 && is_journal(fd))
		halt('W', data, size);
	return real(fd, data, size);
}

int fdatasync(int fd)
{
	static int (*real)(int);
	if (real == NULL)
		real = (int (*)(int))dlsym(RTLD_NEXT, "fdatasync");
	int result = real(fd);
	if (result == 0 && is_journal(fd))
		halt('S', NULL, 0);
	return result;
}

// Preloaded into mpirun where all its ranks are on this host: what it would bind to every address, it binds to
// loopback.
//
// The listener of Open MPI's launchers (oob/tcp) binds to INADDR_ANY, whichever interfaces its parameters name. In any
// other program, the ranks included, this library does nothing. It knows nothing of eprt.

#include <dlfcn.h>
#include <errno.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>

namespace {

bool in_launcher() {
  const char* const launchers[] = {"mpirun", "mpiexec", "orterun", "orted", "prterun", "prte", "prted"};
  for (const char* name : launchers) {
    if (strcmp(program_invocation_short_name, name) == 0) return true;
  }
  return false;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int bind(int fd, const sockaddr* address, socklen_t size) {
  using Bind = int (*)(int, const sockaddr*, socklen_t);
  const auto bind_to = reinterpret_cast<Bind>(dlsym(RTLD_NEXT, "bind"));
  if (address != nullptr && in_launcher()) {
    sockaddr_in v4;
    sockaddr_in6 v6;
    if (address->sa_family == AF_INET && size >= sizeof v4) {
      memcpy(&v4, address, sizeof v4);
      if (v4.sin_addr.s_addr == htonl(INADDR_ANY)) v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
      return bind_to(fd, reinterpret_cast<const sockaddr*>(&v4), sizeof v4);
    }
    if (address->sa_family == AF_INET6 && size >= sizeof v6) {
      memcpy(&v6, address, sizeof v6);
      if (memcmp(&v6.sin6_addr, &in6addr_any, sizeof in6addr_any) == 0) v6.sin6_addr = in6addr_loopback;
      return bind_to(fd, reinterpret_cast<const sockaddr*>(&v6), sizeof v6);
    }
  }
  return bind_to(fd, address, size);
}

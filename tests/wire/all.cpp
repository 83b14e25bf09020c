// One translation unit of everything, which compiles in a third of the time.
#include "../../csrc/wire/mailbox.cpp"
#include "../../csrc/wire/paced_lane.cpp"
#include "../../csrc/wire/proxy.cpp"
#include "../../csrc/wire/tcp_lane.cpp"
#include "stress.cpp"

// A management library of whatever cards the file $NVML_STUB_STATE describes, read anew at every call, so that a test can
// change the machine under a program that runs. Each line is one of
//
//     init CODE                                     what nvmlInit returns
//     card UUID TOTAL FREE PERCENT [mig]            bytes; the share of time a kernel ran
//     instance UUID GPU_INSTANCE COMPUTE_INSTANCE TOTAL FREE    of the card above; UUID "-" is a number not in use
//     process PID BYTES NAME                        of the card or instance above; BYTES "-" is not known
//     fail FUNCTION UUID CODE                       "*" stands for every function, every UUID
//
// With -DOLD it is a library from before MIG and before the third version of the process list.

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

namespace {

enum { SUCCESS = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, LOST = 15 };

struct Process {
  unsigned pid;
  unsigned long long bytes;
  std::string name;
};

struct Device {
  std::string uuid;
  int card = -1;  // position of an instance's card; -1 for a card
  bool mig = false;
  unsigned gpu_instance = 0, compute_instance = 0, percent = 0;
  unsigned long long total = 0, free = 0;
  std::vector<Process> processes;
};

struct Failure {
  std::string function, uuid;
  int code;
};

struct State {
  int init = SUCCESS;
  std::vector<Device> devices;
  std::vector<Failure> failures;

  State() {
    const char* path = std::getenv("NVML_STUB_STATE");
    std::ifstream file(path ? path : "");
    for (std::string line; std::getline(file, line);) read(line);
  }

  void read(const std::string& line) {
    std::istringstream words(line);
    std::string kind, word;
    words >> kind;
    if (kind == "init") {
      words >> init;
    } else if (kind == "card") {
      Device card;
      words >> card.uuid >> card.total >> card.free >> card.percent >> word;
      card.mig = word == "mig";
      devices.push_back(card);
    } else if (kind == "instance") {
      Device instance;
      words >> instance.uuid >> instance.gpu_instance >> instance.compute_instance >> instance.total >> instance.free;
      instance.card = static_cast<int>(devices.size()) - 1;
      while (devices[instance.card].card != -1) instance.card = devices[instance.card].card;
      devices.push_back(instance);
    } else if (kind == "process") {
      Process process;
      words >> process.pid >> word >> std::ws;
      process.bytes = word == "-" ? ~0ull : std::stoull(word);
      std::getline(words, process.name);
      devices.back().processes.push_back(process);
    } else if (kind == "fail") {
      Failure failure;
      words >> failure.function >> failure.uuid >> failure.code;
      failures.push_back(failure);
    }
  }

  int refusal(const char* function, const std::string& uuid) const {
    for (const Failure& failure : failures)
      if ((failure.function == "*" || failure.function == function) && (failure.uuid == "*" || failure.uuid == uuid))
        return failure.code;
    return SUCCESS;
  }

  // The position of the number-th card, or instance of a card; -1 if there is none.
  int find(int card, unsigned number) const {
    for (size_t i = 0; i < devices.size(); ++i)
      if (devices[i].card == card && number-- == 0) return static_cast<int>(i);
    return -1;
  }
};

std::atomic<int> initialisations{0}, shutdowns{0};

void* handle(int position) { return reinterpret_cast<void*>(static_cast<intptr_t>(position) + 1); }

int copy(const std::string& text, char* buffer, unsigned length) {
  if (text.size() >= length) return INSUFFICIENT_SIZE;
  std::memcpy(buffer, text.c_str(), text.size() + 1);
  return SUCCESS;
}

struct NvmlProcess {
  unsigned pid;
  unsigned long long bytes;
  unsigned gpu_instance, compute_instance;
};

int list(const std::vector<Process>& processes, unsigned* count, NvmlProcess* infos) {
  unsigned room = *count;
  *count = static_cast<unsigned>(processes.size());
  if (processes.empty()) return SUCCESS;
  if (!infos || room < processes.size()) return INSUFFICIENT_SIZE;
  for (size_t i = 0; i < processes.size(); ++i) infos[i] = {processes[i].pid, processes[i].bytes, ~0u, ~0u};
  return SUCCESS;
}

}  // namespace

// What every query of a device begins with.
#define DEVICE(function)                                                                        \
  State state;                                                                                  \
  size_t position = reinterpret_cast<intptr_t>(device) - 1;                                     \
  if (position >= state.devices.size()) return INVALID;                                         \
  const Device& it = state.devices[position];                                                   \
  if (int code = state.refusal(function, it.uuid)) return code

extern "C" {

int stub_initialisations() { return initialisations; }
int stub_shutdowns() { return shutdowns; }

int nvmlInitWithFlags(unsigned) {
  int code = State().init;
  if (code == SUCCESS) ++initialisations;
  return code;
}

int nvmlShutdown() {
  ++shutdowns;
  return SUCCESS;
}

const char* nvmlErrorString(int) { return "an error of the stub"; }

int nvmlDeviceGetCount_v2(unsigned* count) {
  State state;
  for (*count = 0; state.find(-1, *count) >= 0;) ++*count;
  return state.refusal("nvmlDeviceGetCount", "*");
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
  State state;
  int position = state.find(-1, index);
  if (position < 0) return INVALID;
  *device = handle(position);
  return state.refusal("nvmlDeviceGetHandleByIndex", state.devices[position].uuid);
}

int nvmlDeviceGetHandleByUUID(const char* uuid, void** device) {
  State state;
  for (const Failure& failure : state.failures)
    if (failure.code == LOST) return LOST;  // "if any GPU has fallen off the bus", as NVML's reference says
  for (size_t i = 0; i < state.devices.size(); ++i)
    if (state.devices[i].uuid == uuid) {
      *device = handle(static_cast<int>(i));
      return state.refusal("nvmlDeviceGetHandleByUUID", uuid);
    }
  return NOT_FOUND;
}

int nvmlDeviceGetUUID(void* device, char* buffer, unsigned length) {
  DEVICE("nvmlDeviceGetUUID");
  return copy(it.uuid, buffer, length);
}

int nvmlDeviceGetName(void* device, char* buffer, unsigned length) {
  DEVICE("nvmlDeviceGetName");
  return copy("Stub " + it.uuid.substr(0, 8), buffer, length);
}

int nvmlDeviceGetMemoryInfo(void* device, unsigned long long* total_free_used) {
  DEVICE("nvmlDeviceGetMemoryInfo");
  total_free_used[0] = it.total;
  total_free_used[1] = it.free;
  total_free_used[2] = it.total - it.free;
  return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(void* device, unsigned* gpu_memory) {
  DEVICE("nvmlDeviceGetUtilizationRates");
  if (it.card != -1) return NOT_SUPPORTED;  // as on MIG instances
  gpu_memory[0] = it.percent;
  gpu_memory[1] = 0;
  return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v2(void* device, unsigned* count, NvmlProcess* infos) {
  DEVICE("nvmlDeviceGetComputeRunningProcesses");
  return list(it.processes, count, infos);
}

int nvmlSystemGetProcessName(unsigned pid, char* buffer, unsigned length) {
  State state;
  if (int code = state.refusal("nvmlSystemGetProcessName", "*")) return code;
  for (const Device& device : state.devices)
    for (const Process& process : device.processes)
      if (process.pid == pid) return copy(process.name, buffer, length);
  return NOT_FOUND;
}

#ifndef OLD

int nvmlDeviceGetComputeRunningProcesses_v3(void* device, unsigned* count, NvmlProcess* infos) {
  return nvmlDeviceGetComputeRunningProcesses_v2(device, count, infos);
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(void* device, unsigned* count, NvmlProcess* infos) {
  DEVICE("nvmlDeviceGetGraphicsRunningProcesses");
  if (it.card != -1) return NOT_SUPPORTED;
  return list(it.processes, count, infos);  // here every process also draws
}

int nvmlDeviceGetMigMode(void* device, unsigned* current, unsigned* pending) {
  DEVICE("nvmlDeviceGetMigMode");
  *current = *pending = it.mig;
  return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(void* device, unsigned* count) {
  DEVICE("nvmlDeviceGetMaxMigDeviceCount");
  *count = it.mig ? 7 : 0;
  return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(void* device, unsigned index, void** instance) {
  DEVICE("nvmlDeviceGetMigDeviceHandleByIndex");
  int found = state.find(static_cast<int>(position), index);
  if (found < 0 || state.devices[found].uuid == "-") return NOT_FOUND;
  *instance = handle(found);
  return SUCCESS;
}

int nvmlDeviceGetGpuInstanceId(void* device, unsigned* id) {
  DEVICE("nvmlDeviceGetGpuInstanceId");
  *id = it.gpu_instance;
  return SUCCESS;
}

int nvmlDeviceGetComputeInstanceId(void* device, unsigned* id) {
  DEVICE("nvmlDeviceGetComputeInstanceId");
  *id = it.compute_instance;
  return SUCCESS;
}

#endif  // OLD

}  // extern "C"

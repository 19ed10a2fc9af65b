// torch's own caching allocator for CUDA, without a device: a program that has those functions of CUDA's runtime, of its
// driver and of NVML that the allocator calls. They give out addresses behind each other, and count bytes.
//
// Reads one line for each thing to do: "allocate BYTES", "free N" of what the Nth request got, "empty" the cache, "limit
// BYTES" that can be had, "begin" anew. Writes for each the bytes that are allocated and reserved, -1 for both where memory
// ran out; for "segments" the sizes of the blocks of each, below 0 those that are free.

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/PeerToPeerAccess.h>
#include <dlfcn.h>

#include <cstring>
#include <iostream>
#include <string>
#include <unordered_map>
#include <vector>

constexpr size_t kMegabyte = size_t{1} << 20, kTotal = size_t{1} << 40;
static size_t limit, used, next_address = kTotal;
static std::unordered_map<size_t, size_t> sizes;  // by address, or by the handle of memory that can be mapped

static bool take(size_t key, size_t size) {
  if (used + size > limit) return false;
  used += size;
  sizes[key] = size;
  return true;
}

static void give_back(size_t key) {
  used -= sizes[key];
  sizes.erase(key);
}

static size_t address_of(size_t size) {
  const auto found = next_address;
  next_address += (size / (2 * kMegabyte) + 2) * (2 * kMegabyte);
  return found;
}

static CUresult reserve_addresses(CUdeviceptr* found, size_t size, size_t, CUdeviceptr, unsigned long long) {
  *found = address_of(size);
  return CUDA_SUCCESS;
}

static CUresult create(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp*, unsigned long long) {
  static size_t last = 0;
  if (!take(++last, size)) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = last;
  return CUDA_SUCCESS;
}

static CUresult release(CUmemGenericAllocationHandle handle) {
  give_back(handle);
  return CUDA_SUCCESS;
}

static CUresult attribute(int* value, CUdevice_attribute, CUdevice) {
  *value = 0;
  return CUDA_SUCCESS;
}

static int succeed() { return 0; }

extern "C" {
cudaError_t cudaMalloc(void** found, size_t size) {
  const auto address = address_of(size);
  if (!take(address, size)) return cudaErrorMemoryAllocation;
  *found = reinterpret_cast<void*>(address);
  return cudaSuccess;
}

cudaError_t cudaFree(void* address) {
  give_back(reinterpret_cast<size_t>(address));
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *free = limit - used;
  *total = kTotal;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  std::memset(properties, 0, sizeof *properties);
  properties->totalGlobalMem = kTotal;
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = *greatest = 0;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

cudaError_t cudaGetDriverEntryPointByVersion(
    const char* symbol, void** function, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* result) {
  const std::string name = symbol;
  void* found = reinterpret_cast<void*>(succeed);
  if (name == "cuMemAddressReserve") found = reinterpret_cast<void*>(reserve_addresses);
  if (name == "cuMemCreate") found = reinterpret_cast<void*>(create);
  if (name == "cuMemRelease") found = reinterpret_cast<void*>(release);
  if (name == "cuDeviceGetAttribute") found = reinterpret_cast<void*>(attribute);
  *function = found;
  if (result != nullptr) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

int nvmlInit_v2() { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char*, void**) { return 0; }
int nvmlDeviceGetGpuFabricInfoV(void*, void*) { return 0; }
int nvmlDeviceGetNvLinkRemoteDeviceType() { return 0; }  // these three must be there
int nvmlDeviceGetNvLinkRemotePciInfo_v2() { return 0; }
int nvmlSystemGetCudaDriverVersion_v2() { return 0; }
int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) {
  *count = 0;
  return 0;
}

// NVML is in this program
void* dlopen(const char* name, int flags) {
  static const auto original = reinterpret_cast<void* (*)(const char*, int)>(dlsym(RTLD_NEXT, "dlopen"));
  const bool is_nvml = name != nullptr && std::string(name).find("nvidia-ml") != std::string::npos;
  return original(is_nvml ? nullptr : name, flags);
}
}

namespace allocator = c10::cuda::CUDACachingAllocator;

int main() {
  limit = kTotal;
  allocator::init(1);
  c10::cuda::detail::init_p2p_access_cache(1);
  std::vector<void*> requests;
  std::string action;
  while (std::cin >> action) {
    size_t number = 0;
    bool is_out_of_memory = false;
    if (action == "allocate") {
      std::cin >> number;
      requests.push_back(nullptr);
      try {
        requests.back() = allocator::raw_alloc(number);
      } catch (const c10::OutOfMemoryError&) {
        is_out_of_memory = true;
      }
    } else if (action == "free") {
      std::cin >> number;
      allocator::raw_delete(requests[number]);
      requests[number] = nullptr;
    } else if (action == "limit") {
      std::cin >> limit;
    } else if (action == "empty") {
      allocator::emptyCache();
    } else if (action == "begin") {
      for (auto* request : requests) {
        if (request != nullptr) allocator::raw_delete(request);
      }
      requests.clear();
      allocator::emptyCache();
      allocator::resetPeakStats(0);
    } else if (action == "segments") {
      std::string separator;
      for (const auto& segment : allocator::snapshot().segments) {
        for (const auto& block : segment.blocks) {
          std::cout << separator << (block.active ? "" : "-") << block.size;
          separator = ",";
        }
        separator = " ";
      }
      std::cout << '\n';
      continue;
    }
    const auto stats = allocator::getDeviceStats(0);
    if (is_out_of_memory) {
      std::cout << "-1 -1\n";
    } else {
      std::cout << stats.allocated_bytes[0].current << ' ' << stats.reserved_bytes[0].current << '\n';
    }
  }
}

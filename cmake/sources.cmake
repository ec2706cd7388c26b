# The one list of sources. An op adds its stem to SPECDEC_OPS; its files then follow by name:
# kernels/<op>/cpu.cpp, kernels/<op>/cuda.cu, ops/<op>.cpp.
set(SPECDEC_OPS append_kv block_tree build_tree compact_kv expand_tree fuse_features inject_kv markov_draft next_round row_linear
    sample schedule_prefix tree_from_mask tree_links verify_attention verify_chain verify_tree)

# Further CUDA files of an op (instances, combine kernels), relative to csrc/.
set(SPECDEC_EXTRA_CUDA
    kernels/verify_attention/instances/attend_bf16_64.cu
    kernels/verify_attention/instances/attend_bf16_80.cu
    kernels/verify_attention/instances/attend_bf16_96.cu
    kernels/verify_attention/instances/attend_bf16_128.cu
    kernels/verify_attention/instances/attend_bf16_192.cu
    kernels/verify_attention/instances/attend_bf16_256.cu
    kernels/verify_attention/instances/attend_f16_64.cu
    kernels/verify_attention/instances/attend_f16_80.cu
    kernels/verify_attention/instances/attend_f16_96.cu
    kernels/verify_attention/instances/attend_f16_128.cu
    kernels/verify_attention/instances/attend_f16_192.cu
    kernels/verify_attention/instances/attend_f16_256.cu
    kernels/verify_attention/instances/attend_bf16_f8_64.cu
    kernels/verify_attention/instances/attend_bf16_f8_80.cu
    kernels/verify_attention/instances/attend_bf16_f8_96.cu
    kernels/verify_attention/instances/attend_bf16_f8_128.cu
    kernels/verify_attention/instances/attend_bf16_f8_192.cu
    kernels/verify_attention/instances/attend_bf16_f8_256.cu
    kernels/verify_attention/instances/attend_f16_f8_64.cu
    kernels/verify_attention/instances/attend_f16_f8_80.cu
    kernels/verify_attention/instances/attend_f16_f8_96.cu
    kernels/verify_attention/instances/attend_f16_f8_128.cu
    kernels/verify_attention/instances/attend_f16_f8_192.cu
    kernels/verify_attention/instances/attend_f16_f8_256.cu)

set(SPECDEC_COMMON_SOURCES kernels/common/isa.cpp kernels/common/parallel.cpp)
set(SPECDEC_STABLE_SOURCES stable/abi.cpp stable/check.cpp stable/control_args.cpp
    stable/verify_args.cpp)
set(SPECDEC_SCHEMA_SOURCES schema.cpp)

set(SPECDEC_CPU_KERNELS)
set(SPECDEC_CUDA_KERNELS ${SPECDEC_EXTRA_CUDA})
set(SPECDEC_OP_SOURCES)
set(SPECDEC_CUDA_OP_SOURCES)
foreach(op IN LISTS SPECDEC_OPS)
  list(APPEND SPECDEC_CPU_KERNELS kernels/${op}/cpu.cpp)
  list(APPEND SPECDEC_OP_SOURCES ops/${op}.cpp)
  if(EXISTS ${CMAKE_CURRENT_LIST_DIR}/../csrc/kernels/${op}/cuda.cu)
    list(APPEND SPECDEC_CUDA_KERNELS kernels/${op}/cuda.cu)
    list(APPEND SPECDEC_CUDA_OP_SOURCES ops/${op}.cpp)
  endif()
endforeach()
foreach(group COMMON_SOURCES STABLE_SOURCES SCHEMA_SOURCES CPU_KERNELS CUDA_KERNELS OP_SOURCES
              CUDA_OP_SOURCES)
  list(TRANSFORM SPECDEC_${group} PREPEND ${CMAKE_CURRENT_LIST_DIR}/../csrc/)
endforeach()

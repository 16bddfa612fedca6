// Attention for sm_90a: heads with INT8 values, and heads with e4m3 values.
#include "../attend_sm90.cuh"

extern "C" __global__ void __launch_bounds__(384, 1)
    nox_attend_int8(const __grid_constant__ nox::AttendParams params) {
  nox::attend_sm90<nox::Int8Softmax>(params);
}

extern "C" __global__ void __launch_bounds__(384, 1)
    nox_attend_e4m3(const __grid_constant__ nox::AttendParams params) {
  nox::attend_sm90<nox::E4m3Softmax>(params);
}

//! The vendor libraries as they are: types, functions looked up at run time, and thin calls. The only module with
//! unsafe code.
//!
//! `library` finds and opens, `synapse` is the runtime (device, memory, streams, events), `hccl` the collectives. Calls
//! take addresses; that the memory behind them lives until the operation is finished is the engine's promise (INV-8:
//! it owns the tensors and leaks them when that is not certain).
//!
//! Names, signatures and numbers are from what Intel publishes: the HCCL C API page of the Intel Gaudi documentation
//! (`API_Reference_Guides/HCCL_APIs/C_API`), `hccl.h` and `hccl_types.h` in the HCL repository, `synapse_api.h` and
//! `synapse_common_types.h` beside them, and the order of calls in the hccl_demo repository.

pub(crate) mod hccl;
pub(crate) mod library;
pub(crate) mod memory;
pub(crate) mod synapse;

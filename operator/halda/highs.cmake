# Several source files at a time are compiled as one, so that their headers are read once: half the time, the same library.
# (HiGHS itself does this on macOS.) .cargo/config.toml names this file.
set(CMAKE_UNITY_BUILD ON)
set(CMAKE_UNITY_BUILD_BATCH_SIZE 16)

# A file such as this one has to say it all when the target is another processor: cargo's build script leaves it to it then. The compilers
# are those that its environment names for Rust's other dependencies, too (images/compile.sh).
if(NOT "$ENV{TARGET}" STREQUAL "$ENV{HOST}")
    string(REPLACE - _ target "$ENV{TARGET}")
    set(CMAKE_SYSTEM_NAME Linux)
    set(CMAKE_SYSTEM_PROCESSOR $ENV{CARGO_CFG_TARGET_ARCH})
    set(CMAKE_C_COMPILER $ENV{CC_${target}})
    set(CMAKE_CXX_COMPILER $ENV{CXX_${target}})
endif()

# Several source files at a time are compiled as one, so that their headers are read once: half the time, the same library.
# (HiGHS itself does this on macOS.) .cargo/config.toml names this file.
set(CMAKE_UNITY_BUILD ON)
set(CMAKE_UNITY_BUILD_BATCH_SIZE 16)

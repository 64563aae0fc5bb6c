// The values of IQ4_NL and IQ4_XS (ggml/src/ggml-common.h: kvalues_iq4nl).
const VALUES = vec4u(0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u);

// What becomes of the gate of a feed-forward part and what it lets through. 0: SiLU; 1: GELU by its usual approximation (Hendrycks and
// Gimpel 2016); 2: SwiGLU of numbers that are kept within a limit (gpt-oss).
fn gated(gate: vec4f, up: vec4f, activation: u32) -> vec4f {
    if activation == 1u {
        let inner = 0.7978845608028654 * gate * (1.0 + 0.044715 * gate * gate);
        // Beyond 15 the result is 1 anyway, and some drivers' is none.
        return 0.5 * gate * (1.0 + tanh(clamp(inner, vec4f(-15.0), vec4f(15.0)))) * up;
    }
    if activation == 2u {
        let limit = vec4f(7.0);
        let kept = min(gate, limit);
        return kept / (1.0 + exp(-1.702 * kept)) * (clamp(up, -limit, limit) + 1.0);
    }
    return gate / (1.0 + exp(-gate)) * up;
}

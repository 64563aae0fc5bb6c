// What is done with the gate of a feed-forward part. 0: SiLU; 1: GELU by its usual approximation (Hendrycks and Gimpel 2016).
fn activated(x: vec4f, activation: u32) -> vec4f {
    if activation == 1u {
        let inner = 0.7978845608028654 * x * (1.0 + 0.044715 * x * x);
        // Beyond 15 the result is 1 anyway, and some drivers' is none.
        return 0.5 * x * (1.0 + tanh(clamp(inner, vec4f(-15.0), vec4f(15.0))));
    }
    return x / (1.0 + exp(-x));
}

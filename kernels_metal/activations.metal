// Helpers (a header, not a kernel body): what joins the gate's and the up projection's product.

constant constexpr int SILU = 0;
constant constexpr int GELU = 1;  // by tanh, Hendrycks and Gimpel 2016

template <int ACTIVATION>
inline float activate(const float gate, const float up) {
  if (ACTIVATION == GELU) {
    const float inner = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);
    return 0.5f * gate * (1.0f + precise::tanh(inner)) * up;
  }
  return gate / (1.0f + exp(-gate)) * up;
}

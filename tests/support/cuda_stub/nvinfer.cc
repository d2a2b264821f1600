// Lets the TensorRT provider library load: an object with enough virtual functions, all returning null.
struct Nothing {
#define SLOT(n) virtual void *slot##n() { return nullptr; }
    SLOT(0) SLOT(1) SLOT(2) SLOT(3) SLOT(4) SLOT(5) SLOT(6) SLOT(7)
    SLOT(8) SLOT(9) SLOT(10) SLOT(11) SLOT(12) SLOT(13) SLOT(14) SLOT(15)
};
static Nothing nothing;

extern "C" {
void *createInferBuilder_INTERNAL(void *, int) { return &nothing; }
void *createInferRefitter_INTERNAL(void *, void *, int) { return &nothing; }
void *createInferRuntime_INTERNAL(void *, int) { return &nothing; }
void *getPluginRegistry() { return &nothing; }
int getInferLibVersion() { return 101400; }
}

/* Linked by the provider, never called while a session is created. */
int stub_curand;
